"""Notes on what the tensors of a graph were made of, for kernels that compute several layers in one loop.

A TensorFlow tensor knows only its operation. A note is also found through operations that pass numbers on.
"""

from typing import Any

import tensorflow as tf

# Operations whose outputs are their inputs' numbers in the same order.
FORWARDING = ("EnsureShape", "Identity", "IdentityN", "Reshape")
_ATTRIBUTE = "_towers_made"
# Attribute of operations with a gradient of their own, as `tf.custom_gradient` makes them.
_OWN_GRADIENT = "_gradient_op_type"


def note(tensor: tf.Tensor, made: Any) -> tf.Tensor:
    """The tensor; from now on `made_by` returns `made` for it. Outside of graphs nothing is noted."""
    if (key := _key(tensor)) is not None:
        # Notes are an attribute of the graph, because they hold its tensors: so they keep no other graph in
        # memory.
        if (notes := getattr(tensor.graph, _ATTRIBUTE, None)) is None:
            setattr(tensor.graph, _ATTRIBUTE, notes := {})
        notes[key] = made
    return tensor


def made_by(tensor: tf.Tensor) -> Any:
    """The note on the tensor, or on an earlier one whose numbers and gradient it passes on; None without one."""
    for earlier in _passed_on(tensor):
        if (found := getattr(earlier.graph, _ATTRIBUTE, {}).get(_key(earlier))) is not None:
            return found
        if _OWN_GRADIENT in earlier.op.node_def.attr:
            return None
    return None


def passes_on(tensor: tf.Tensor, earlier: tf.Tensor) -> bool:
    """Whether `tensor` is `earlier`, or has its numbers through operations that pass them on."""
    return any(one.graph is earlier.graph and _key(one) == _key(earlier) for one in _passed_on(tensor))


def source(tensor: tf.Tensor) -> str:
    """The type of the operation that computed the tensor's numbers; '' outside of graphs."""
    *_, first = ["", *(earlier.op.type for earlier in _passed_on(tensor))]
    return first


def _passed_on(tensor):
    """Yields the tensor, and the earlier tensors whose numbers it passes on; nothing without a graph."""
    while getattr(tensor, "op", None) is not None:
        yield tensor
        if tensor.op.type not in FORWARDING:
            return
        tensor = tensor.op.inputs[tensor.value_index]


def _key(tensor):
    operation = getattr(tensor, "op", None)
    return None if operation is None else (operation.name, tensor.value_index)
