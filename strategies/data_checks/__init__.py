"""A user's data: checked weights, the checks before training, errors as one line, and what is not finite."""
