"""Pipelines as data: who computes what when, and where a model is cut. Plain arithmetic, no tensors."""
