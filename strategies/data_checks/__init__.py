"""Checks of a user's data: weights, first batches, errors in one line, values that are not finite."""
