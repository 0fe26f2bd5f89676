"""Batch norm inside a tower: which layers run on which kernel.

calls.py      what a layer's call becomes
kernels.py    TensorFlow's fused kernel and plain operations
compiled.py   compiled loops, where they pay
loops.py      the loops
synced.py     the statistics of all towers' examples, by any of these
"""
