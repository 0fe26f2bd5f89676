"""What layers compute by other means than Keras has them while a tower is traced, to the same result."""
