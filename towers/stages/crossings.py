"""Tensors that cross from one part of a model to another, while the model is traced.

    part 0             part 1
    x -> leaving ----> arriving -> ...          forward
    g <- leaving <---- g                        backward

Between two parts a tensor passes two identities, one in each part. So whatever a part keeps for its backward pass,
and the gradient that it receives, are results of the part's own operations.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from towers.stages.marks import Marks


class Crossings:
    """The crossings of one run of a model. A part is a stage, or a device of a tower."""

    def __init__(self, marks: Marks):
        self._marks = marks
        self._left: dict[int, tf.Tensor] = {}
        self._arrived: dict[tuple[int, int], tf.Tensor] = {}

    def at(self, part: int, source: int | None, value):
        """A value as an operation of `part` reads it. Call it while the part's operations are created.

        Args:
          part: the part.
          source: the part that computed it; None for an input of the model that has no gradient.
          value: a tensor, whose Keras mask crosses too; None stays None.
        """
        if source == part or value is None:
            return value
        key = (id(value), part)
        if key not in self._arrived:
            self._arrived[key] = _with_mask_of(value, tf.identity, self._leaving(source, value))
        return self._arrived[key]

    def _leaving(self, source: int | None, value):
        if source is None:
            return value
        # A sparse or ragged tensor consists of several tensors, and has no gradient itself.
        return tf.nest.map_structure(
            functools.partial(self._tensor_leaving, source), value, expand_composites=True
        )

    def _tensor_leaving(self, source: int, value):
        if not tf.is_tensor(value) or not value.dtype.is_floating:
            return value
        if id(value) not in self._left:
            with self._marks.at(source):
                self._left[id(value)] = self._identity_of(source)(value)
        return self._left[id(value)]

    def _identity_of(self, part: int) -> Callable:
        """An identity whose gradient is an operation of the part."""

        @tf.custom_gradient
        def identity(value):
            def gradient(upstream):
                with self._marks.at(part):
                    return tf.identity(upstream)

            return tf.identity(value), gradient

        return identity


def _with_mask_of(value, function, leaving):
    """`function(leaving)`, with Keras's mask of `value`."""
    found = function(leaving)
    mask = keras.src.backend.get_keras_mask(value)
    if mask is not None:
        keras.src.backend.set_keras_mask(found, function(mask))
    return found
