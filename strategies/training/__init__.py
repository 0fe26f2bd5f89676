"""The Trainer, and its parts that work with any strategy: checkpoints, cadence, export, verification."""
