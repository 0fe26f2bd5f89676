"""Tensors between layers whose parts are known, so that a layer can read the parts instead of the whole.

A layer that is split gives each device some of its last dimension. Its output is their concatenation, as Keras
expects. If the next layer reads the parts, nothing reads the concatenation, and TensorFlow removes it.
"""

from collections.abc import Sequence

import tensorflow as tf


class DividedTensors:
    """Remembers which parts a tensor was joined from, along its last dimension."""

    def __init__(self):
        self._parts: dict = {}

    def join(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """The parts as one tensor, on the current device."""
        whole = tf.concat(parts, -1)
        self._parts[whole.ref()] = tuple(parts)
        return whole

    def known_parts(self, whole: tf.Tensor) -> tuple[tf.Tensor, ...] | None:
        """The parts that the tensor was joined from; None if it was not joined here."""
        return self._parts.get(whole.ref())

    def parts(self, whole: tf.Tensor, lengths: Sequence[int]) -> Sequence[tf.Tensor]:
        """Parts of these lengths: those that were joined if they fit, or else cut on the current device."""
        known = self.known_parts(whole)
        if known is not None and [part.shape[-1] for part in known] == list(lengths):
            return known
        return tf.split(whole, lengths, -1)
