"""Sources of examples (drawn, from TFDS, or a user's own) and their division into batches."""
