"""Sends int32 to a GPU as int64, because TensorFlow keeps int32 arguments of functions in the host's memory.

    host    int32 -> int64, copied ahead  ->  GPU    int64, argument of the step -> int32, in the tower

An int32 on the GPU would be copied back before each step, and the host would wait for it. All other numeric dtypes
stay on the GPU (TensorFlow's kernels for `_Arg` and `Identity`). The cast in the tower runs on the GPU, so its
result is in the GPU's memory.
"""

from typing import Any

import tensorflow as tf

from towers.task import Batch


def widened(batch: Batch) -> Batch:
    """The batch with int64 in place of int32."""
    return tf.nest.map_structure(lambda tensor: tf.cast(tensor, _wide(tensor.dtype)), batch)


def widened_spec(spec: Any) -> Any:
    """The spec of a widened batch."""
    return tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape, _wide(one.dtype)), spec)


def narrowed(batch: Batch, spec: Batch) -> Batch:
    """A batch, widened or not, with the dtypes of `spec`."""
    pairs = zip(tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True)
    return tf.nest.pack_sequence_as(batch, [tf.cast(tensor, one.dtype) for tensor, one in pairs])


def _wide(dtype: tf.DType) -> tf.DType:
    return tf.int64 if dtype == tf.int32 else dtype
