"""A variable of another worker, as this worker's checkpoint sees it: a name, a shape, and for a moment a value."""

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY, Trackable
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec


class RemoteVariable(Trackable):
    """Has a value only between its arrival and `release`, and only on the worker that writes checkpoints.

    Attributes:
      shape, dtype, device: as of a variable.
    """

    def __init__(self, like: tf.Variable, *, keeps: bool):
        """Args:
        like: a variable of this worker with the same shape and dtype.
        keeps: whether this worker keeps a value that is assigned; the others drop it.
        """
        self.shape, self.dtype = like.shape, like.dtype
        # TensorFlow restores variables of several tasks in a graph, without values for us.
        self.device = like.device
        self._keeps = keeps
        self._value: np.ndarray | None = None

    @property
    def is_here(self) -> bool:
        """Whether it has a value."""
        return self._value is not None

    def numpy(self) -> np.ndarray:
        """The value.

        Raises:
          RuntimeError: it is not here.
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

    def saveable(self, place: str, name: str) -> SaveableObject:
        """What writes and restores it; arguments as for `CopiedVariable.saveable`."""
        return _RemoteSaveable(self, place, name)

    def _gather_saveables_for_checkpoint(self):
        """As `Trackable`."""
        return {VARIABLE_VALUE_KEY: lambda name: self.saveable("", name)}


class _RemoteSaveable(SaveableObject):
    def __init__(self, variable: RemoteVariable, place: str, name: str):
        self._variable = variable
        spec = SaveSpec(variable.read_value, place, name, dtype=variable.dtype, device=variable.device)
        super().__init__(variable, [spec], name)

    def restore(self, restored_tensors, restored_shapes):
        self._variable.assign(restored_tensors[0])


tf.register_tensor_conversion_function(
    RemoteVariable, lambda value, dtype=None, name=None, as_ref=False: value.read_value()
)
