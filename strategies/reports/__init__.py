"""A run's outputs: progress display, metrics.jsonl, TensorBoard, profile, summary.json. No file knows a mode."""
