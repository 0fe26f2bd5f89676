"""Kinds of a step's tensors, found in two graphs of the step that differ in the length of the batch."""

import math
from collections.abc import Sequence

import tensorflow as tf

# The batch itself; what grows with its length; what depends only on its values; all else.
BATCH, ACTIVATIONS, GRADIENTS, COPIES = "batch", "activations", "gradients", "copies"


def kinds_of(few: tf.Graph, more: tf.Graph, batch: Sequence[str]) -> dict[str, str]:
    """The kind of each tensor, by its name.

    Args:
      few, more: the graph for a batch, and for a longer one.
      batch: names of the operations whose outputs are the batch.
    """
    kinds: dict[str, str] = {}
    for one, other in zip(few.get_operations(), more.get_operations(), strict=True):
        depends = one.name in batch or any(kinds.get(tensor.name) != COPIES for tensor in one.inputs)
        for tensor, larger in zip(one.outputs, other.outputs, strict=True):
            grows = tensor_bytes(tensor) != tensor_bytes(larger)
            kinds[tensor.name] = ACTIVATIONS if grows else GRADIENTS if depends else COPIES
            if one.name in batch:
                kinds[tensor.name] = BATCH
    return kinds


def tensor_bytes(tensor: tf.Tensor) -> int:
    """Bytes of a tensor; 0 for handles, strings and shapes that are not known."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or not tensor.shape.is_fully_defined():
        return 0
    return tensor.dtype.size * math.prod(tensor.shape)
