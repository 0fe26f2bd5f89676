"""How a gradient changes a parameter: rules, schedules, clipping, and Keras optimizers translated into them."""
