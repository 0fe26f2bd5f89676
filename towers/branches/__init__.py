"""A tower of several devices that compute the independent branches of a model's blocks at the same time."""
