"""Mechanisms on the devices of one process. Knows tensors and device names: no cluster, flags or files."""
