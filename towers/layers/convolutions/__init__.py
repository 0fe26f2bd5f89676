"""Convolutions inside a tower: other kernels for them and their gradients, each where it pays.

replaced.py               which layers get another kernel
examples_as_channels.py   kernels' gradients as convolutions of long rows
transposed_pairs.py       their inputs, transposed as words
winograd.py               Winograd's method: where it pays
winograd_loops.py         its compiled loops
winograd_transforms.py    its matrices
"""
