"""A tower of several devices: a model cut into stages, and the graphs of its passes through them."""
