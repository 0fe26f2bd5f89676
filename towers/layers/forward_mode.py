"""In forward-mode differentiation layers keep their own functions, for which TensorFlow has the derivatives."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import forwardprop_util  # the only way to ask whether a tensor has a tangent

Replacement = tuple[keras.layers.Layer, str, Any]


def unless_forward(replacements: Iterable[Replacement]) -> Iterator[Replacement]:
    """The same replacements, but tensors watched by a `ForwardAccumulator` go to the layer's own function.

    The kernels have custom gradients and compiled loops, which TensorFlow can't differentiate in forward mode.

    Args:
      replacements: (layer, attribute, value), not yet in place.
    """
    for layer, name, value in replacements:
        own = getattr(layer, name, None)
        # A layer has no attribute of this name if the replacement only records something.
        yield layer, name, value if own is None else _either(own, value)


def _either(own: Callable, replacement: Callable) -> Callable:
    # Keras describes functions in a layer's configuration by their names.
    @functools.wraps(replacement)
    def called(*arguments, **named):
        tensors = [value for value in tf.nest.flatten([arguments, named]) if isinstance(value, tf.Tensor)]
        is_followed = bool(forwardprop_util.pack_tangents(tensors).tangents)
        return (own if is_followed else replacement)(*arguments, **named)

    return called
