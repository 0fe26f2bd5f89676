"""A variable with a copy on each of several devices. A checkpoint stores it once, and restores every copy."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf


class CopiedVariable:
    """Equal variables on several devices, used as one.

    Attributes:
      copies: the variables, each on its device; checkpoints store the first one.
    """

    def __init__(self, copies: Sequence[tf.Variable]):
        self.copies = tuple(copies)

    @property
    def dtype(self) -> tf.DType:
        return self.copies[0].dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self.copies[0].shape

    def read_value(self) -> tf.Tensor:
        """The value of the first copy."""
        return self.copies[0].read_value()

    def numpy(self) -> np.ndarray:
        """The value of the first copy."""
        return self.copies[0].numpy()

    def assign(self, value) -> None:
        """Assigns to every copy."""
        for copy in self.copies:
            copy.assign(value)


tf.register_tensor_conversion_function(
    CopiedVariable, lambda value, dtype=None, name=None, as_ref=False: value.read_value()
)
