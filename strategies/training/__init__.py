"""The Trainer and what it does with a strategy of any mode: checkpoints, cadence, export, verification."""
