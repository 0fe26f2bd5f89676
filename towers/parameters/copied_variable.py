"""A variable with a copy on each of several devices; a checkpoint has it once, and sets every copy."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY, Trackable
from tensorflow.python.training.saving.saveable_object_util import ResourceVariableSaveable


class CopiedVariable(Trackable):
    """Equal variables.

    Attributes:
      copies: each a variable on its device; the first one is written to checkpoints.
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

    def saveable(self, place: str, name: str) -> ResourceVariableSaveable:
        """What writes the first copy and restores all.

        Args:
          place: the slice of the checkpoint's tensor that this variable is, as TensorFlow writes it; '' for all.
          name: the tensor's name.
        """
        return _CopiesSaveable(self.copies, place, name)

    def _gather_saveables_for_checkpoint(self):
        """As `Trackable`."""
        return {VARIABLE_VALUE_KEY: lambda name: self.saveable("", name)}


class _CopiesSaveable(ResourceVariableSaveable):
    def __init__(self, copies: Sequence[tf.Variable], place: str, name: str):
        super().__init__(copies[0], place, name)
        self._others = [ResourceVariableSaveable(copy, place, name) for copy in copies[1:]]

    def restore(self, restored_tensors, restored_shapes):
        for other in self._others:
            other.restore(restored_tensors, restored_shapes)
        return super().restore(restored_tensors, restored_shapes)


tf.register_tensor_conversion_function(
    CopiedVariable, lambda value, dtype=None, name=None, as_ref=False: value.read_value()
)
