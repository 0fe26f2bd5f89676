"""What a run shows and writes: progress, metrics.jsonl, TensorBoard, summary.json. No file here knows a mode."""
