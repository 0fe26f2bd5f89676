"""A user's own arrays or tf.data dataset as batches of a task."""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.errors import UserError, is_integer
from towers.task import Batch, InputShard, as_batch, batch_length, examples_between, length

_DENSE = "its batches can't be cut into parts for towers; convert it with tf.sparse.to_dense"


def check_data(what: str, data: Any) -> None:
    """Checks that data are arrays or a tf.data dataset of batches.

    Args:
      what: name of the data in messages.
      data: arrays (features, labels, weights), or a dataset of these.

    Raises:
      UserError: `data` is something else, a dataset of single examples, or has arrays that are not of numbers, or
        weights that are not finite, are below 0 or are all 0.
    """
    if isinstance(data, tf.data.Dataset):
        _check_kinds(what, tf.nest.flatten(data.element_spec))
        _check_batches(what, tf.nest.flatten(data.element_spec))
        _check_real(what, as_batch(data.element_spec, f"an element of {what}"))
        return
    if isinstance(data, keras.utils.PyDataset) or callable(data) or isinstance(data, Iterator):
        raise UserError(
            f"{what} is a {type(data).__name__}: must be arrays or a tf.data dataset of batches; "
            "make one with tf.data.Dataset.from_generator(function, output_signature=...)"
        )
    batch = as_batch(data, what)
    if all(array is None for array in tf.nest.flatten(batch.features)):
        raise UserError(f"{what} has no array of features: pass (features, labels), a tuple")
    for array in tf.nest.flatten(batch):
        _check_dense(what, array)
    count_examples(batch, what)
    _check_real(what, batch)
    weights = [array for array in tf.nest.flatten(batch.weights) if array is not None]
    _check_weights(what, [np.asarray(array) for array in weights])


def _check_dense(what: str, array: Any) -> None:
    """Raises UserError if `array` is not an array of numbers or texts."""
    if isinstance(array, tf.SparseTensor):
        raise UserError(f"{what} has a SparseTensor: {_DENSE}")
    if isinstance(array, tf.RaggedTensor):
        raise UserError(f"{what} has a RaggedTensor: must be dense arrays; fill it up with .to_tensor()")
    if np.ma.is_masked(array):
        raise UserError(
            f"{what} has an array with {np.ma.count_masked(array)} masked values, which would be used as if they "
            "were not masked: fill them with .filled(value), and give weights of 0 to examples without a value"
        )
    dtype = _dtype_of(array)
    if _is_unknown(dtype):
        raise UserError(
            f"{what} has an array of {dtype.name}, shape {list(array.shape)}: must be numbers of one type; "
            "convert it, for example with numpy.array(list, 'float32')"
        )
    if getattr(dtype, "hasobject", False):
        _check_objects(what, np.asarray(array))


def _dtype_of(array: Any) -> Any:
    """The type of an array's elements; those of pandas as NumPy has them, None for a list."""
    dtype = getattr(array, "dtype", None)
    is_known = isinstance(dtype, np.dtype | tf.DType | str) or not hasattr(array, "shape")
    return dtype if is_known else np.asarray(array).dtype


def _check_objects(what: str, array: np.ndarray) -> None:
    """Raises UserError if an array of Python objects does not hold texts only, as columns of pandas do."""
    other = next((one for one in array.flat if not isinstance(one, str | bytes)), "")
    if isinstance(other, str):
        return
    if isinstance(other, list | tuple | np.ndarray):
        problem = f"one of them a {type(other).__name__} of {len(other)}"
        fix = (
            "must be one array; fill them up to one length, for numbers for example with keras.utils.pad_sequences"
        )
    elif any(isinstance(one, str | bytes) for one in array.flat):
        problem = f"some of them texts, and one {reprlib.repr(other)}"
        fix = "must be all texts or all numbers; replace missing values, or pass both as two inputs"
    else:
        problem = f"one of them {reprlib.repr(other)}"
        fix = "must be numbers of one type; convert it, for example with numpy.array(list, 'float32')"
    raise UserError(f"{what} has an array of Python objects, shape {list(array.shape)}, {problem}: {fix}")


def _is_unknown(dtype: Any) -> bool:
    """Whether NumPy has this type and TensorFlow does not: dates, times, records, long double."""
    if not isinstance(dtype, np.dtype):
        return False
    try:
        tf.as_dtype(dtype)
    except TypeError:
        return True
    return False


def _check_weights(what: str, weights: Sequence[np.ndarray]) -> None:
    """Raises UserError for weights that define no mean: not finite, below 0, or all 0."""
    weights = [array for array in weights if array.dtype.kind in "fiub"]
    if not all(np.isfinite(array).all() for array in weights):
        raise UserError(f"{what} has weights that are NaN or infinite: clean the data")
    smallest = min((array.min(initial=0) for array in weights), default=0)
    if smallest < 0:
        raise UserError(
            f"{what} has weights below 0 (the smallest is {smallest:g}): a weight is how much an example counts, "
            "so it must be at least 0; correct the weights"
        )
    if weights and not any(array.any() for array in weights):
        raise UserError(f"{what} has only weights of 0: no example would count; omit or correct the weights")


def _check_real(what: str, batch: Batch) -> None:
    """Raises UserError for complex labels and weights, whose imaginary parts a loss would drop."""
    for part in ("labels", "weights"):
        for one in tf.nest.flatten(getattr(batch, part)):
            dtype = _dtype_of(one)
            if dtype is not None and tf.as_dtype(dtype).is_complex:
                raise UserError(
                    f"{what} has {part} of {tf.as_dtype(dtype).name}: must be real numbers; pass real and "
                    "imaginary parts as two"
                )


def _check_kinds(what: str, specs: Sequence[tf.TypeSpec]) -> None:
    """Raises UserError for components that can't be cut into parts, or whose number of dimensions is unknown."""
    if any(isinstance(spec, tf.SparseTensorSpec) for spec in specs):
        raise UserError(f"{what} has a SparseTensor: {_DENSE}")
    if any(isinstance(spec, tf.RaggedTensorSpec) for spec in specs):
        raise UserError(
            f"{what} has a RaggedTensor: must yield dense tensors; fill up each batch, for example with "
            ".padded_batch(batch_size), or .map(lambda x, y: (x.to_tensor(), y))"
        )
    other = next((spec for spec in specs if not hasattr(spec, "shape")), None)
    if other is not None:
        raise UserError(
            f"{what} yields a {other.value_type.__name__}: must yield dense tensors; omit None, as in (features, "
            "labels), and use .batch(batch_size) for .window(...)"
        )
    if any(spec.shape.rank is None for spec in specs):
        raise UserError(
            f"{what} has tensors of unknown shape: at least their number of dimensions must be known; pass "
            "output_signature=tf.TensorSpec([None, ...], dtype) to from_generator, or use tf.ensure_shape"
        )


def _check_batches(what: str, specs: Sequence[tf.TypeSpec]) -> None:
    """Raises UserError if a dataset of these components yields single examples."""
    scalars = [spec.dtype.name for spec in specs if spec.shape.rank == 0]
    lengths = {spec.shape[0] for spec in specs if spec.shape.rank} - {None}
    if scalars or len(lengths) > 1:
        yields = (
            f"{scalars[0]} scalars" if scalars else f"tensors of {', '.join(map(str, sorted(lengths)))} examples"
        )
        raise UserError(f"{what} yields {yields}: must yield batches; add .batch(batch_size)")


def _check_lengths(batch: Batch) -> None:
    """Adds a check to the graph: it fails if parts of a dataset's batch have different numbers of examples."""
    first, *others = (length(tensor) for tensor in tf.nest.flatten(batch) if isinstance(tensor, tf.Tensor))
    for other in others:
        tf.debugging.assert_equal(other, first, "parts of a batch have other numbers of examples")


def count_examples(batch: Batch, what: str = "a batch") -> int:
    """Number of examples in the batch: the length of its arrays in dimension 0.

    Args:
      batch: arrays.
      what: name of the data in messages.

    Raises:
      UserError: the lengths differ or are 0, or an array has no dimension.
    """
    shapes = [np.shape(array) for array in tf.nest.flatten(batch) if array is not None]
    lengths = sorted({shape[0] if shape else 0 for shape in shapes})
    if len(lengths) != 1 or lengths[0] == 0:
        raise UserError(
            f"{what} has arrays of {', '.join(map(str, lengths)) or 'no'} examples: "
            "features, labels and weights must have the same dimension 0, at least 1; "
            "pass arrays, not lists of numbers"
        )
    return int(lengths[0])


def host_tensors(data: Any) -> Batch:
    """Arrays as tensors in the host's memory. As in Keras, float64 becomes float32; lists become tuples.

    None (no weights, or no labels for an output without a loss) becomes (), which has no tensor.
    """

    def to_tensor(array: Any) -> tf.Tensor:
        # Of NumPy's arrays of texts TensorFlow knows those of Python objects, not those of StringDType.
        are_objects = getattr(_dtype_of(array), "hasobject", False)
        tensor = tf.convert_to_tensor(np.asarray(array, object) if are_objects else array)
        return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor

    def convert(structure: Any) -> Any:
        if isinstance(structure, Mapping):
            return {key: convert(value) for key, value in structure.items()}
        # tf.data would convert a list to one tensor.
        if isinstance(structure, (list, tuple)):
            return tuple(convert(value) for value in structure)
        return () if structure is None else to_tensor(structure)

    with tf.init_scope(), tf.device("CPU:0"):
        return Batch(*(convert(part) for part in as_batch(data)))


def check_size(name: str, size: Any) -> None:
    """Raises UserError for a size that is not an integer of at least 1; None is allowed."""
    if size is not None and (not is_integer(size) or size < 1):
        raise UserError(f"{name}={size!r}: must be an integer of at least 1; use for example {name}=32")


def checked_batch_size(data: Any, given: int | None) -> int:
    """`given`, or the batch size in a dataset's element spec.

    Raises:
      UserError: neither is known, it is below 1, or the two differ.
    """
    check_size("batch_size", given)
    if not isinstance(data, tf.data.Dataset):
        if given is None:
            raise UserError("batch_size=None: arrays need a batch size; pass for example batch_size=32")
        return given
    known = known_batch_size(data)
    if known is None and given is None:
        raise UserError(
            "batch_size=None: the element spec of train_data has no batch size; "
            "pass batch_size, or use .batch(..., drop_remainder=True)"
        )
    if None not in (known, given) and known != given:
        raise UserError(f"batch_size={given}: train_data yields batches of {known}; omit batch_size")
    return known or given


def known_batch_size(data: Any) -> int | None:
    """The batch size in a dataset's element spec; None if it has none, and for arrays."""
    if not isinstance(data, tf.data.Dataset):
        return None
    spec = tf.nest.flatten(data.element_spec)[0]
    return spec.shape[0] if spec.shape.rank else None


def num_batches(data: Any) -> int | None:
    """Number of batches in a dataset; None if it is unknown or infinite, and for arrays."""
    if not isinstance(data, tf.data.Dataset):
        return None
    found = int(data.cardinality())
    return found if found > 0 else None


def dataset_stream(data: tf.data.Dataset, *, repeated: bool, shard: InputShard) -> tf.data.Dataset:
    """The shard's parts of the user's batches, from batch shard.first_batch on."""
    first = shard.first_batch
    in_pass = num_batches(data)
    if repeated and in_pass is not None:
        # Every pass is the same: whole passes need not be read.
        first %= in_pass
    batches = (data.repeat() if repeated else data).skip(first).shard(shard.stride, 0)

    def cut(*parts: Any) -> Batch:
        batch = as_batch(parts[0] if len(parts) == 1 else parts)
        _check_lengths(batch)
        return examples_between(batch, *shard.bounds(batch_length(batch)))

    options = tf.data.Options()
    # The shard already divides the batches: a tf.distribute strategy must not divide them again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return batches.map(tf.autograph.experimental.do_not_convert(cut)).prefetch(2).with_options(options)
