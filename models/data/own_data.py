"""A user's own arrays or tf.data dataset as batches of a task."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.errors import UserError
from towers.task import Batch, InputShard, as_batch, batch_length


def count_examples(batch: Batch) -> int:
    """Length of the batch's arrays in dimension 0.

    Raises:
      UserError: the lengths differ or are 0, or an array has no dimension.
    """
    shapes = [np.shape(array) for array in tf.nest.flatten(batch)]
    lengths = sorted({shape[0] if shape else 0 for shape in shapes})
    if len(lengths) != 1 or lengths[0] == 0:
        raise UserError(
            f"arrays of {', '.join(map(str, lengths)) or 'no'} examples: "
            "features, labels and weights must have the same dimension 0, at least 1; "
            "pass arrays, not lists of numbers"
        )
    return int(lengths[0])


def host_tensors(data: Any) -> Batch:
    """Arrays as tensors in the host's memory. As in Keras, float64 becomes float32; lists become tuples."""

    def to_tensor(array: Any) -> tf.Tensor:
        tensor = tf.convert_to_tensor(array)
        return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor

    def convert(structure: Any) -> Any:
        if isinstance(structure, Mapping):
            return {key: convert(value) for key, value in structure.items()}
        # tf.data would convert a list to one tensor.
        if isinstance(structure, (list, tuple)):
            return tuple(convert(value) for value in structure)
        return to_tensor(structure)

    with tf.init_scope(), tf.device("CPU:0"):
        return Batch(*(convert(part) for part in as_batch(data)))


def checked_batch_size(data: Any, given: int | None) -> int:
    """`given`, or the batch size in a dataset's element spec.

    Raises:
      UserError: neither is known, it is below 1, or the two differ.
    """
    if given is not None and given < 1:
        raise UserError(f"batch_size={given}: must be at least 1; use for example batch_size=32")
    if not isinstance(data, tf.data.Dataset):
        if given is None:
            raise UserError("batch_size=None: arrays need a batch size; pass for example batch_size=32")
        return given
    spec = tf.nest.flatten(data.element_spec)[0]
    if spec.shape.rank == 0:
        raise UserError(f"train_data yields {spec.dtype.name} scalars: must yield batches; add .batch(batch_size)")
    known = spec.shape[0] if spec.shape.rank else None
    if known is None and given is None:
        raise UserError(
            "batch_size=None: the element spec of train_data has no batch size; "
            "pass batch_size, or use .batch(..., drop_remainder=True)"
        )
    if None not in (known, given) and known != given:
        raise UserError(f"batch_size={given}: train_data yields batches of {known}; omit batch_size")
    return known or given


def dataset_stream(data: tf.data.Dataset, *, repeated: bool, shard: InputShard) -> tf.data.Dataset:
    """The shard's parts of the user's batches, from batch shard.first_batch on."""
    first = shard.first_batch
    if repeated and data.cardinality() > 0:
        # Every pass is the same: whole passes need not be read.
        first %= int(data.cardinality())
    batches = (data.repeat() if repeated else data).skip(first).shard(shard.stride, 0)

    def cut(*parts: Any) -> Batch:
        batch = as_batch(parts[0] if len(parts) == 1 else parts)
        begin, end = shard.bounds(batch_length(batch))
        return tf.nest.map_structure(lambda tensor: tensor[begin:end], batch)

    options = tf.data.Options()
    # The shard already divides the batches: a tf.distribute strategy must not divide them again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return batches.map(tf.autograph.experimental.do_not_convert(cut)).prefetch(2).with_options(options)
