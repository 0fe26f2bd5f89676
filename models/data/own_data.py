"""A user's own arrays or tf.data dataset as batches of a task."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.errors import UserError
from towers.task import Batch, InputShard, as_batch, batch_length


def check_data(what: str, data: Any) -> None:
    """Checks that data are arrays or a tf.data dataset of batches.

    Args:
      what: name of the data in messages.
      data: arrays (features, labels, weights), or a dataset of these.

    Raises:
      UserError: something else, a dataset of single examples, or arrays of objects.
    """
    if isinstance(data, tf.data.Dataset):
        _check_batches(what, tf.nest.flatten(data.element_spec))
        return
    if isinstance(data, keras.utils.PyDataset) or callable(data) or isinstance(data, Iterator):
        raise UserError(
            f"{what} is a {type(data).__name__}: must be arrays or a tf.data dataset of batches; "
            "make one with tf.data.Dataset.from_generator(function, output_signature=...)"
        )
    for array in tf.nest.flatten(as_batch(data)):
        if getattr(getattr(array, "dtype", None), "hasobject", False):
            raise UserError(
                f"{what} has an array of Python objects, shape {list(array.shape)}: must be numbers of one type; "
                "convert it, for example with numpy.array(list, 'float32')"
            )
    count_examples(as_batch(data))
    weights = as_batch(data).weights
    for array in () if weights is None else tf.nest.flatten(weights):
        if array is not None and not np.isfinite(np.asarray(array, np.float64)).all():
            raise UserError(f"{what} has weights that are NaN or infinite: clean the data")


def _check_batches(what: str, specs: Sequence[tf.TypeSpec]) -> None:
    """Raises UserError if a dataset of these components yields single examples."""
    scalars = [spec.dtype.name for spec in specs if spec.shape.rank == 0]
    lengths = {spec.shape[0] for spec in specs if spec.shape.rank} - {None}
    if scalars or len(lengths) > 1:
        yields = (
            f"{scalars[0]} scalars" if scalars else f"tensors of {', '.join(map(str, sorted(lengths)))} examples"
        )
        raise UserError(f"{what} yields {yields}: must yield batches; add .batch(batch_size)")


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
