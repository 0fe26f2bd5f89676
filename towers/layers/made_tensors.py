"""What the tensors of a graph were made of, for kernels that compute more in one loop than one layer's part.

TensorFlow's tensors know their operation alone. What made one is found through operations that pass numbers on.
"""

from typing import Any

import tensorflow as tf

# Operations whose outputs are their inputs' numbers in the same order.
FORWARDING = ("EnsureShape", "Identity", "IdentityN", "Reshape")
_ATTRIBUTE = "_towers_made"
# Of operations with another gradient than their type's, as `tf.custom_gradient` makes them.
_OWN_GRADIENT = "_gradient_op_type"


def note(tensor: tf.Tensor, made: Any) -> tf.Tensor:
    """The tensor, for which `made_by` gives `made` from now on; without a graph nothing is noted."""
    if (key := _key(tensor)) is not None:
        # The graph's own, as what is noted holds tensors of the graph: it keeps no other graph in memory.
        if (notes := getattr(tensor.graph, _ATTRIBUTE, None)) is None:
            setattr(tensor.graph, _ATTRIBUTE, notes := {})
        notes[key] = made
    return tensor


def made_by(tensor: tf.Tensor) -> Any:
    """What was noted for the tensor or for one that it passes on, gradient included; None if nothing was."""
    for earlier in _passed_on(tensor):
        if (found := getattr(earlier.graph, _ATTRIBUTE, {}).get(_key(earlier))) is not None:
            return found
        if _OWN_GRADIENT in earlier.op.node_def.attr:
            return None
    return None


def passes_on(tensor: tf.Tensor, earlier: tf.Tensor) -> bool:
    """Whether it has the numbers of the other one through operations that pass them on, or is it."""
    return any(one.graph is earlier.graph and _key(one) == _key(earlier) for one in _passed_on(tensor))


def source(tensor: tf.Tensor) -> str:
    """The type of the operation that computed its numbers; '' outside of graphs."""
    *_, first = ["", *(earlier.op.type for earlier in _passed_on(tensor))]
    return first


def _passed_on(tensor):
    """The tensor, and the earlier ones of the graph whose numbers it has; none without a graph."""
    while getattr(tensor, "op", None) is not None:
        yield tensor
        if tensor.op.type not in FORWARDING:
            return
        tensor = tensor.op.inputs[tensor.value_index]


def _key(tensor):
    operation = getattr(tensor, "op", None)
    return None if operation is None else (operation.name, tensor.value_index)
