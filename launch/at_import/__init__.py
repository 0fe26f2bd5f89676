"""Runs when `launch` is imported, before TensorFlow is imported."""
