"""How gradients change parameters: update rules, schedules, clipping, and the translation of Keras optimizers."""
