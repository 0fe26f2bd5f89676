"""A variable that lies on several devices as slices; in a checkpoint it is one tensor (`strategies.pieces`)."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf


class OtherPart(Protocol):
    """A slice that is not a `tf.Variable`, such as a `CopiedVariable`."""

    dtype: tf.DType
    shape: tf.TensorShape

    def read_value(self) -> tf.Tensor:
        """The value."""

    def numpy(self) -> np.ndarray:
        """The value."""

    def assign(self, value) -> None:
        """Sets the value."""


Part = tf.Variable | OtherPart


class SlicedVariable:
    """Slices of a variable, which checkpoints and other callers can use like one variable.

    Attributes:
      parts: the slices, in order: each a variable on one device, one with copies on several, or another worker's.
      dimension: dimension along which they follow each other.
    """

    def __init__(self, parts: Sequence[Part], dimension: int):
        self.parts, self.dimension = tuple(parts), dimension

    @property
    def dtype(self) -> tf.DType:
        return self.parts[0].dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole."""
        dimensions = self.parts[0].shape.as_list()
        dimensions[self.dimension] = sum(self._lengths)
        return tf.TensorShape(dimensions)

    @property
    def is_here(self) -> bool:
        """Whether this process now has the values of all slices; another worker's slice seldom has one."""
        return all(getattr(part, "is_here", True) for part in self.parts)

    @property
    def _lengths(self) -> list[int]:
        return [part.shape[self.dimension] for part in self.parts]

    def read_value(self) -> tf.Tensor:
        """The whole value, on the current device."""
        return tf.concat([part.read_value() for part in self.parts], self.dimension)

    def numpy(self) -> np.ndarray:
        """The whole value."""
        return np.concatenate([part.numpy() for part in self.parts], self.dimension)

    def assign(self, value) -> None:
        """Assigns to each slice its part of a whole value."""
        cut = tf.split(tf.convert_to_tensor(value, self.dtype), self._lengths, self.dimension)
        for part, own in zip(self.parts, cut, strict=True):
            part.assign(own)


tf.register_tensor_conversion_function(
    SlicedVariable, lambda value, dtype=None, name=None, as_ref=False: value.read_value()
)
