"""A variable of another worker as this worker's checkpoint uses it: a shape, and temporarily a value."""

import numpy as np
import tensorflow as tf


class RemoteVariable:
    """Has a value only from `assign` to `release`, and only on the worker that writes checkpoints.

    Attributes:
      shape, dtype, device: as of a variable.
    """

    def __init__(self, like: tf.Variable, *, keeps: bool):
        """Args:
        like: a variable of this worker with the same shape and dtype.
        keeps: whether this worker keeps a value that is assigned; the others drop it.
        """
        self.shape, self.dtype = like.shape, like.dtype
        self.device = like.device
        self._keeps = keeps
        self._value: np.ndarray | None = None

    @property
    def is_here(self) -> bool:
        """Whether this process now has its value."""
        return self._value is not None

    def numpy(self) -> np.ndarray:
        """The value.

        Raises:
          RuntimeError: this process has no value now.
        """
        if self._value is None:
            raise RuntimeError("another worker has this variable: call collect() first, in all workers")
        return self._value

    def read_value(self) -> tf.Tensor:
        """As `numpy`."""
        return tf.constant(self.numpy())

    def assign(self, value) -> None:
        """Keeps the value if this worker keeps values."""
        if self._keeps:
            self._value = np.asarray(value, self.dtype.as_numpy_dtype)

    def release(self) -> None:
        """Forgets the value."""
        self._value = None


tf.register_tensor_conversion_function(
    RemoteVariable, lambda value, dtype=None, name=None, as_ref=False: value.read_value()
)
