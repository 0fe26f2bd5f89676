"""Bring your own: a Keras model, data and losses as a task.

    task = OwnTask(
        model=build,                                   # a function that gives a built keras.Model
        train_data=(x, y), eval_data=(x_held_out, y_held_out),
        losses=keras.losses.MeanSquaredError(),
        metric_functions={"mae": keras.metrics.mean_absolute_error},
        batch_size=32,
    )

What divides out at the end is the number that `model.compile(...)` and `model.evaluate(...)` give for the
same data in one batch. Over several batches of unequal size or mask Keras averages averages; here sums
meet, and one division follows. Losses that layers add (`model.losses`) are not here.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from models.batch_stream import BatchSlice, eval_stream, train_stream
from towers.errors import UserError
from towers.split import boundaries_tensor, checked_shares
from towers.task import Batch, InputShard, WeightedLoss, WeightedValue, as_batch, batch_length

# Reductions that are a sum divided by a sum, so that parts of a batch add up.
_DIVIDED_BY_VALUES = ("sum_over_batch_size", "mean")
_DIVIDED_BY_WEIGHTS = "mean_with_sample_weight"

MetricFunction = Callable[[Any, Any], Any]


class _Term(NamedTuple):
    """The loss of one output: `scale` times `loss` of (labels, output), with weights or ()."""

    loss: keras.losses.Loss
    scale: float
    labels: Any
    output: Any
    weights: Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OwnTask:
    """Implements `towers.task.Task` over what the user brings.

    Arrays are shuffled as `models.batch_stream` does. A tf.data dataset gives batches as it is: it is
    repeated without end for training and started by skipping, so a resumed run is exact only if each pass
    over it gives the same batches (no shuffle, or shuffle(seed=..., reshuffle_each_iteration=False)).

    Attributes:
      model: a function that gives a new, built model; or a built model, whose copies start from its weights.
      train_data: arrays (features, labels) or (features, labels, weights), each a structure with the examples
        as dimension 0; or a tf.data dataset of batches of these.
      losses: a Keras loss; or one by output name, or a list in the order of the outputs (None: no loss).
      eval_data: as train_data; None where nothing is evaluated.
      loss_weights: factors, by output name or in order, for several losses; None is 1 each.
      metric_functions: by name, functions of (labels, outputs) that give a value for each example, such as
        keras.metrics.sparse_categorical_accuracy; for several outputs such mappings by output name. They are
        averaged with the weights of the examples, as Keras's weighted_metrics.
      batch_size: examples in a global batch; None: what a tf.data train_data says.
      eval_batch_size: for arrays; None is batch_size.
      seed: decides the order of arrays.
      num_input_threads: threads that make batches from arrays.
      name: name of the task, for reports.

    Raises:
      UserError: data of unequal lengths, no batch size, or a loss whose reduction is no division of sums.
    """

    model: keras.Model | Callable[[], keras.Model]
    train_data: Any
    losses: Any
    eval_data: Any = None
    loss_weights: Mapping[str, float] | Sequence[float] | float | None = None
    metric_functions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batch_size: int | None = None
    eval_batch_size: int | None = None
    seed: int = 0
    num_input_threads: int = 2
    name: str = "own"

    def __post_init__(self):
        object.__setattr__(self, "losses", _map_leaves(_checked_loss, self.losses))
        _map_leaves(_check_metric, self.metric_functions)
        for data in (self.train_data, self.eval_data):
            if data is not None and not isinstance(data, tf.data.Dataset):
                _num_examples(as_batch(data))
        batch_size = _batch_size(self.train_data, self.batch_size)
        object.__setattr__(self, "batch_size", batch_size)
        object.__setattr__(self, "eval_batch_size", self.eval_batch_size or batch_size)

    def num_examples(self, split: str) -> int | None:
        """Examples in 'train' or 'eval'; None for a tf.data dataset, which does not say."""
        data = self._data(split)
        return None if isinstance(data, tf.data.Dataset) else _num_examples(as_batch(data))

    def build_model(self) -> keras.Model:
        """A new model from the user's function, or a copy of the user's model with its weights.

        Raises:
          UserError: the function gives no built model, or the model cannot be copied.
        """
        model = _copy(self.model) if isinstance(self.model, keras.Model) else self.model()
        if not isinstance(model, keras.Model) or not model.built:
            raise UserError(
                f"model gives {type(model).__name__}: "
                "a built keras.Model is needed; call model.build(input_shape) first"
            )
        # Remembered, so that finding losses by name does not build another one.
        self.__dict__.setdefault("_output_names", _output_names_of(model))
        return model

    def dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """Batches of `split` as `towers.task.Task.dataset` says."""
        if isinstance(self._data(split), tf.data.Dataset):
            return _dataset_stream(self._data(split), repeated=split == "train", shard=shard)
        arrays = self._train_arrays if split == "train" else self._eval_arrays

        def make_batch(part: BatchSlice) -> Batch:
            return tf.nest.map_structure(lambda array: tf.gather(array, part.indices), arrays)

        sizes = {"num_examples": _num_examples(arrays), "shard": shard, "num_threads": self.num_input_threads}
        if split == "train":
            return train_stream(make_batch, batch_size=self.batch_size, seed=self.seed, **sizes)
        return eval_stream(make_batch, batch_size=self.eval_batch_size, **sizes)

    def loss(self, outputs: Any, batch: Batch) -> WeightedLoss:
        """Sums whose quotient is Keras's loss of the batch.

        One loss: the sum of its values, and how many values (or their weights) there are. Several: for each
        example the mean of each output's values, times its loss_weights, and the number of examples.

        Raises:
          UserError: losses, labels or weights do not fit the outputs, or have no common divisor.
        """
        terms = self._terms(outputs, batch)
        if len(terms) == 1:
            total, weight = _sums(terms[0])
            return WeightedLoss(terms[0].scale * total, weight)
        _check_common_divisor(terms)
        sums = [_sums_by_example(term) for term in terms]
        total = tf.add_n([term.scale * total for term, (total, _) in zip(terms, sums, strict=True)])
        return WeightedLoss(total, sums[0][1])

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, WeightedValue]:
        """The metrics of the batch by name; with several outputs by 'output_name', as Keras names them."""
        if not self.metric_functions:
            return {}
        aligned = self._aligned(outputs, batch.labels, batch.weights)
        by_output = [("", self.metric_functions, *aligned[0])]
        if any(isinstance(functions, Mapping) for functions in self.metric_functions.values()):
            names = self._names(outputs)
            functions = _by_output("metric_functions", self.metric_functions, outputs, lambda: names)
            by_output = [
                (f"{name}_", of_output or {}, *parts)
                for name, of_output, parts in zip(names, functions, aligned, strict=True)
            ]
        elif len(aligned) > 1:
            raise UserError(
                f"metric_functions for {len(aligned)} outputs: say of which; "
                "give mappings by output name, as {'output': {'metric': function}}"
            )
        return {
            prefix + name: _metric(function, labels, output, weights)
            for prefix, functions, output, labels, weights in by_output
            for name, function in functions.items()
        }

    @functools.cached_property
    def _train_arrays(self) -> Batch:
        return _host_tensors(self.train_data)

    @functools.cached_property
    def _eval_arrays(self) -> Batch:
        return _host_tensors(self.eval_data)

    @functools.cached_property
    def _output_names(self) -> tuple[str, ...]:
        with tf.init_scope():
            model = self.model if isinstance(self.model, keras.Model) else self.model()
        return _output_names_of(model)

    def _names(self, outputs: Any) -> tuple[str, ...]:
        return tuple(outputs) if isinstance(outputs, Mapping) else self._output_names

    def _data(self, split: str) -> Any:
        if split not in ("train", "eval"):
            raise UserError(f"split {split!r}: a task has 'train' and 'eval'; name one of them")
        data = self.train_data if split == "train" else self.eval_data
        if data is None:
            raise UserError(f"{split}_data=None: there is nothing to read; pass {split}_data to OwnTask")
        return data

    def _aligned(self, outputs: Any, labels: Any, weights: Any) -> list[tuple[Any, Any, Any]]:
        """(output, labels, weights or ()) of each output."""

        def find(what: str, given: Any) -> list[Any]:
            return _by_output(what, given, outputs, lambda: self._names(outputs))

        of_weights = [()] * len(_flat(outputs)) if _is_empty(weights) else find("weights", weights)
        # What is left out by output, as None, weighs 1.
        of_weights = [() if weight is None else weight for weight in of_weights]
        return list(zip(_flat(outputs), find("labels", labels), of_weights, strict=True))

    def _terms(self, outputs: Any, batch: Batch) -> list[_Term]:
        names = functools.partial(self._names, outputs)
        losses = _by_output("losses", self.losses, outputs, names)
        scales = [1.0] * len(losses)
        if self.loss_weights is not None:
            scales = _by_output("loss_weights", self.loss_weights, outputs, names)
        aligned = self._aligned(outputs, batch.labels, batch.weights)
        return [
            _Term(loss=loss, scale=scale, labels=labels, output=output, weights=weights)
            for loss, scale, (output, labels, weights) in zip(losses, scales, aligned, strict=True)
            if loss is not None
        ]


def _is_empty(value: Any) -> bool:
    return isinstance(value, tuple) and not value


def _flat(outputs: Any) -> list[Any]:
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _output_names_of(model: keras.Model) -> tuple[str, ...]:
    """The names that Keras knows outputs by; a subclassed model has none."""
    if isinstance(model, keras.Sequential):
        return (model.layers[-1].name,)
    return tuple(getattr(model, "output_names", None) or ())


def _map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """As tf.nest.map_structure, but it leaves objects that look like structures alone."""
    if isinstance(structure, Mapping):
        return {key: _map_leaves(function, value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [_map_leaves(function, value) for value in structure]
    return function(structure)


def _by_output(what: str, given: Any, outputs: Any, names: Callable[[], tuple[str, ...]]) -> list[Any]:
    """`given` in the order of the outputs: by name (left out: None), in order, or one for all.

    Raises:
      UserError: names no output, or not one for each.
    """
    num_outputs = len(_flat(outputs))
    if isinstance(given, Mapping):
        if not names():
            raise UserError(f"{what} by name: the model does not name its outputs; give a list in their order")
        unknown = sorted(set(given) - set(names()))
        if unknown:
            raise UserError(
                f"{what} for {unknown[0]!r}: the outputs are {', '.join(names())}; use one of these names"
            )
        return [given.get(name) for name in names()]
    if isinstance(given, (list, tuple)):
        if isinstance(outputs, Mapping):
            raise UserError(f"{what} in order: the outputs have names, {', '.join(names())}; give a dict by name")
        if len(given) != num_outputs:
            raise UserError(f"{len(given)} {what} for {num_outputs} outputs: give one an output")
        return list(given)
    if what == "labels" and num_outputs > 1:
        raise UserError(f"one array of labels for {num_outputs} outputs: give labels by name or in order")
    return [given] * num_outputs


def _checked_loss(loss: Any) -> keras.losses.Loss | None:
    """A Keras loss whose reduction is a division of sums.

    Raises:
      UserError: it is something else.
    """
    if loss is None:
        return None
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if not isinstance(loss, keras.losses.Loss):
        raise UserError(
            f"loss {getattr(loss, '__name__', loss)!r}: an instance of a Keras loss is needed; "
            "pass for example keras.losses.MeanSquaredError()"
        )
    if loss.reduction not in (*_DIVIDED_BY_VALUES, _DIVIDED_BY_WEIGHTS):
        raise UserError(
            f"loss {loss.name}: reduction={loss.reduction!r} depends on how many examples meet in one place; "
            "use reduction='sum_over_batch_size' or 'mean_with_sample_weight'"
        )
    return loss


def _check_metric(function: Any) -> None:
    if isinstance(function, keras.metrics.Metric) or not callable(function):
        raise UserError(
            f"metric {getattr(function, 'name', function)!r}: "
            "a function of (labels, outputs) that gives a value for each example is needed; "
            "pass for example keras.metrics.sparse_categorical_accuracy"
        )


def _values(term: _Term) -> tf.Tensor:
    """The loss's undivided values, float32 [N] or [N, ...]."""
    dtype = term.loss.dtype
    values = term.loss.call(tf.cast(term.labels, dtype), tf.cast(term.output, dtype))
    if values.shape.rank == 0:
        raise UserError(
            f"loss {term.loss.name}: gives one number for a batch; its call() must give one for each example"
        )
    return tf.cast(values, tf.float32)


def _mask(output: Any) -> tf.Tensor | None:
    """Which places of an output count, as a Masking or Embedding layer said; Keras hangs it on the tensor."""
    mask = getattr(output, "_keras_mask", None)
    return None if mask is None else tf.cast(mask, tf.float32)


def _fitted(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Weights [N], [N, 1] or as `values` with the dimensions of `values`, to multiply."""
    weights = tf.cast(weights, tf.float32)
    while weights.shape.rank > values.shape.rank and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, axis=-1)
    while weights.shape.rank < values.shape.rank:
        weights = tf.expand_dims(weights, axis=-1)
    return weights


def _sums(term: _Term) -> tuple[tf.Tensor, tf.Tensor]:
    """Sum of one loss's values and what Keras divides it by.

    keras.losses.Loss.__call__: 'sum_over_batch_size' divides by the number of values that the mask leaves,
    whatever the sample weights; 'mean_with_sample_weight' divides by the sum of mask times weights. (Weights
    [N] of examples with several values count once a value here; Keras takes none, and [N, 1] once.)
    """
    values = _values(term)
    mask = _mask(term.output)
    weights = tf.ones_like(values) if mask is None else tf.ones_like(values) * _fitted(values, mask)
    divisor = tf.reduce_sum(weights)
    if not _is_empty(term.weights):
        weights = weights * _fitted(values, term.weights)
        if term.loss.reduction == _DIVIDED_BY_WEIGHTS:
            divisor = tf.reduce_sum(weights)
    return tf.reduce_sum(values * weights), divisor


def _sums_by_example(term: _Term) -> tuple[tf.Tensor, tf.Tensor]:
    """Sum over the examples of the mean of each one's values, and the number (or weight) of examples."""
    values = _values(term)
    values_an_example = tf.cast(tf.reduce_prod(tf.shape(values)[1:]), tf.float32)
    num_examples = tf.cast(tf.shape(values)[0], tf.float32)
    if _is_empty(term.weights):
        return tf.reduce_sum(values) / values_an_example, num_examples
    weights = _fitted(values, term.weights)
    total = tf.reduce_sum(values * weights) / values_an_example
    is_by_weight = term.loss.reduction == _DIVIDED_BY_WEIGHTS
    return total, tf.reduce_sum(weights) if is_by_weight else num_examples


def _check_common_divisor(terms: Sequence[_Term]) -> None:
    """Several losses need one divisor.

    Raises:
      UserError: a mask, or weights with a reduction that divides by them in some losses but not in all.
    """
    if any(_mask(term.output) is not None for term in terms):
        raise UserError(
            "a masked output beside others: each loss would have a divisor of its own; "
            "leave the mask out and give weights [N, T] instead"
        )
    weighted = [term for term in terms if not _is_empty(term.weights)]
    by_weight = [term for term in weighted if term.loss.reduction == _DIVIDED_BY_WEIGHTS]
    same = all(term.weights is terms[0].weights for term in terms)
    if by_weight and not (len(by_weight) == len(terms) and same and terms[0].weights.shape.rank == 1):
        raise UserError(
            f"loss {by_weight[0].loss.name}: 'mean_with_sample_weight' beside other losses "
            "needs the same weights [N] and reduction for all; use reduction='sum_over_batch_size'"
        )


def _metric(function: MetricFunction, labels: Any, output: Any, weights: Any) -> WeightedValue:
    """Weighted sum of a metric's values, float32, and of their weights."""
    if isinstance(output, tf.Tensor) and output.dtype.is_floating:
        mask, output = _mask(output), tf.cast(output, tf.float32)
    else:
        mask = None
    values = tf.cast(function(labels, output), tf.float32)
    counted = tf.ones_like(values) if mask is None else tf.ones_like(values) * _fitted(values, mask)
    if not _is_empty(weights):
        counted = counted * _fitted(values, weights)
    return WeightedValue(tf.reduce_sum(values * counted), tf.reduce_sum(counted))


def _num_examples(batch: Batch) -> int:
    """Length of the arrays.

    Raises:
      UserError: they differ, or one has no dimension.
    """
    shapes = [np.shape(array) for array in tf.nest.flatten(batch)]
    lengths = sorted({shape[0] if shape else 0 for shape in shapes})
    if len(lengths) != 1 or lengths[0] == 0:
        raise UserError(
            f"arrays of {', '.join(map(str, lengths)) or 'no'} examples: "
            "features, labels and weights need the same number, at least 1, as dimension 0; "
            "give arrays, not lists of numbers"
        )
    return int(lengths[0])


def _host_tensors(data: Any) -> Batch:
    """Arrays as tensors in the host's memory; as in Keras, float64 becomes float32, and lists tuples."""

    def to_tensor(array: Any) -> tf.Tensor:
        tensor = tf.convert_to_tensor(array)
        return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor

    def convert(structure: Any) -> Any:
        if isinstance(structure, Mapping):
            return {key: convert(value) for key, value in structure.items()}
        # tf.data takes a list for one tensor.
        if isinstance(structure, (list, tuple)):
            return tuple(convert(value) for value in structure)
        return to_tensor(structure)

    with tf.init_scope(), tf.device("CPU:0"):
        return Batch(*(convert(part) for part in as_batch(data)))


def _batch_size(data: Any, given: int | None) -> int:
    """The batch size asked for, or what a dataset's element spec says.

    Raises:
      UserError: there is none, or it is below 1, or the dataset says another.
    """
    if given is not None and given < 1:
        raise UserError(f"batch_size={given}: a batch holds at least one example; use 32 or so")
    if not isinstance(data, tf.data.Dataset):
        if given is None:
            raise UserError("batch_size=None: arrays do not say how to batch them; pass batch_size=32 or so")
        return given
    spec = tf.nest.flatten(data.element_spec)[0]
    if spec.shape.rank == 0:
        raise UserError(f"train_data gives {spec.dtype.name} scalars: batches are needed; add .batch(batch_size)")
    known = spec.shape[0] if spec.shape.rank else None
    if known is None and given is None:
        raise UserError(
            "train_data does not say its batch size: pass batch_size, or .batch(..., drop_remainder=True)"
        )
    if None not in (known, given) and known != given:
        raise UserError(f"batch_size={given}: train_data gives batches of {known}; leave batch_size out")
    return known or given


def _dataset_stream(data: tf.data.Dataset, *, repeated: bool, shard: InputShard) -> tf.data.Dataset:
    """The user's batches from shard.first_batch on, and of each the shard's part."""
    shares = checked_shares(shard.shares, shard.count, "shares")
    first = shard.first_batch
    if repeated and data.cardinality() > 0:
        # Whole passes are not read through: each is the same.
        first %= int(data.cardinality())
    batches = (data.repeat() if repeated else data).skip(first)

    def cut(*parts: Any) -> Batch:
        batch = as_batch(parts[0] if len(parts) == 1 else parts)
        ends = boundaries_tensor(batch_length(batch), shares)
        begin, end = ends[shard.index], ends[shard.index + 1]
        return tf.nest.map_structure(lambda tensor: tensor[begin:end], batch)

    options = tf.data.Options()
    # The shard divides the batches: a tf.distribute strategy must not divide them again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return batches.map(tf.autograph.experimental.do_not_convert(cut)).prefetch(2).with_options(options)


def _copy(model: keras.Model) -> keras.Model:
    """A model of the same layers with the same weights.

    Raises:
      UserError: Keras cannot rebuild it from its configuration.
    """
    try:
        copy = keras.models.clone_model(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UserError(
            f"model {model.name!r} cannot be copied ({type(error).__name__}): "
            "pass a function that builds it instead"
        ) from error
    copy.set_weights(model.get_weights())
    return copy
