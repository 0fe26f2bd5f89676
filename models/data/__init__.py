"""Where examples come from and which of them is in which batch: drawn, from TFDS, or a user's own."""
