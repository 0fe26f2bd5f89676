"""What happens when this package is imported, before TensorFlow is."""
