"""A task from a user's own Keras model, data and losses.

    task = OwnTask(
        model=build,                                   # a function that returns a built keras.Model
        train_data=(x, y), eval_data=(x_held_out, y_held_out),
        losses=keras.losses.MeanSquaredError(),
        metric_functions={"mae": keras.metrics.mean_absolute_error},
        batch_size=32,
    )

The reported loss and metrics equal those of `model.compile(...)` and `model.evaluate(...)` for the same data in
one batch. Over several batches of unequal size or mask, Keras averages the batches' averages; here the sums
of all batches are added and divided once. Losses that layers add (`model.losses`) are not included.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from models.data.batch_stream import BatchSlice, eval_stream, train_stream
from models.data.own_data import (
    check_data,
    check_size,
    checked_batch_size,
    count_examples,
    dataset_stream,
    host_tensors,
    known_batch_size,
    num_batches,
)
from models.data.splits import checked_split
from models.keras_losses import (
    Term,
    check_common_divisor,
    check_metric,
    checked_loss,
    is_empty,
    loss_sums,
    loss_sums_by_example,
    metric_sums,
)
from models.model_outputs import flat, flat_leaves, given_by_output, map_leaves, output_names_of
from models.own_model import build
from towers.errors import UserError, is_integer
from towers.task import Batch, InputShard, WeightedLoss, WeightedValue, as_batch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OwnTask:
    """A `towers.task.Task` with a user's own model, data and losses.

    Arrays are shuffled by `models.data.batch_stream`. A tf.data dataset yields its batches unchanged. For training
    it is repeated without end, and a resumed run skips the batches before its first one. So a resumed run is exact
    only if each pass over the dataset yields the same batches: use no shuffle, or
    shuffle(seed=..., reshuffle_each_iteration=False).

    Attributes:
      model: a function that returns a new, built model; or a built model, whose copies start with its weights.
      train_data: arrays (features, labels) or (features, labels, weights), each a structure with the examples in
        dimension 0, of numbers or texts; or a tf.data dataset of batches of these, whose cardinality is an epoch
        (a dataset from a generator gets one by tf.data.experimental.assert_cardinality). Weights are of examples;
        of a weight for each class, as Keras's class_weight, make them by numpy.array(class_weights)[labels].
      losses: a Keras loss for the only output; or a dict by output name, or a list in the order of the outputs
        (None: no loss).
      eval_data: held-out data in one of the same forms; None: nothing is evaluated.
      loss_weights: factors of the losses, a dict by output name or a list in the order of the outputs; None, and
        an output without a factor: 1.
      metric_functions: functions of (labels, outputs) that return a value for each example, by metric name, for
        example keras.metrics.sparse_categorical_accuracy; for several outputs, such mappings by output name, or a
        list of them in the order of the outputs. The values are averaged with the examples' weights, as in Keras's
        weighted_metrics.
      batch_size: examples in a global batch; None: the batch size in the element spec of a tf.data train_data.
      eval_batch_size: examples in an evaluation batch made from arrays; None: batch_size. A tf.data eval_data has
        the size in its element spec.
      seed: seed of the order of the examples in arrays.
      num_input_threads: threads that prepare batches from arrays.
      name: name of the task, for reports.

    Raises:
      UserError: data have unequal lengths, there is no batch size, or a loss can't be summed over parts.
    """

    model: keras.Model | Callable[[], keras.Model]
    train_data: Any
    losses: Any
    eval_data: Any = None
    loss_weights: Mapping[str, float] | Sequence[float | None] | float | None = None
    metric_functions: Mapping[str, Any] | Sequence[Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # Both are integers once the task is constructed.
    batch_size: int = cast(int, None)
    eval_batch_size: int = cast(int, None)
    seed: int = 0
    num_input_threads: int = 2
    name: str = "own"

    def __post_init__(self):
        object.__setattr__(self, "losses", map_leaves(checked_loss, self.losses))
        self._check_metrics()
        if not any(loss is not None for loss in flat_leaves(self.losses)):
            raise UserError(
                f"losses={self.losses}: training needs a loss; pass for example keras.losses.MeanSquaredError()"
            )
        for what, data in (("train_data", self.train_data), ("eval_data", self.eval_data)):
            if data is not None or what == "train_data":
                check_data(what, data)
        self._check_plain_fields()
        batch_size = checked_batch_size(self.train_data, self.batch_size)
        check_size("eval_batch_size", self.eval_batch_size)
        check_size("num_input_threads", self.num_input_threads)
        object.__setattr__(self, "batch_size", batch_size)
        known = known_batch_size(self.eval_data)
        object.__setattr__(self, "eval_batch_size", known or self.eval_batch_size or batch_size)

    def _check_plain_fields(self) -> None:
        if not isinstance(self.model, keras.Model) and not callable(self.model):
            raise UserError(
                f"model={self.model!r}: must be a built keras.Model or a function that returns one; pass for "
                "example model=build"
            )
        if not is_integer(self.seed):
            raise UserError(f"OwnTask(seed={self.seed!r}): must be an integer; use for example OwnTask(seed=0)")
        if isinstance(self.loss_weights, np.ndarray):
            object.__setattr__(self, "loss_weights", self.loss_weights.tolist())
        factors = [one for one in flat_leaves(self.loss_weights) if one is not None]
        if not all(isinstance(one, numbers.Real) and math.isfinite(one) for one in factors):
            raise UserError(f"loss_weights={self.loss_weights!r}: must be finite numbers; correct them")

    def _check_metrics(self) -> None:
        of_outputs = self.metric_functions
        if isinstance(of_outputs, Mapping):
            of_outputs = [of_outputs, *(one for one in of_outputs.values() if isinstance(one, Mapping))]
        if not isinstance(of_outputs, list | tuple) or not all(map(_is_by_name, of_outputs)):
            raise UserError(
                f"metric_functions={self.metric_functions!r}: must be functions by name, or a list of such "
                "mappings for several outputs; pass for example {'mae': keras.metrics.mean_absolute_error}"
            )
        map_leaves(check_metric, self.metric_functions)

    def num_examples(self, split: str) -> int | None:
        """Number of examples in 'train' or 'eval'; None for a tf.data dataset; 0 for eval_data=None."""
        if checked_split(split) == "eval" and self.eval_data is None:
            return 0
        data = self._data(split)
        return None if isinstance(data, tf.data.Dataset) else count_examples(as_batch(data))

    @functools.cached_property
    def batches_per_epoch(self) -> int | None:
        """Number of batches in a tf.data train_data; None if TensorFlow does not know it, and for arrays."""
        return num_batches(self.train_data)

    def build_model(self) -> keras.Model:
        """A new model from the user's function, or a copy of the user's model with its weights.

        Raises:
          UserError: the model can't be trained; see `models.own_model.build`.
        """
        model = build(self.model)
        # Cached, so that finding losses by output name does not build another model.
        self.__dict__.setdefault("_output_names", output_names_of(model))
        return model

    def dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """Batches of `split`; see `towers.task.Task.dataset`."""
        if isinstance(self._data(split), tf.data.Dataset):
            return dataset_stream(self._data(split), repeated=split == "train", shard=shard)
        arrays = self._train_arrays if split == "train" else self._eval_arrays

        def make_batch(part: BatchSlice) -> Batch:
            return tf.nest.map_structure(lambda array: tf.gather(array, part.indices), arrays)

        sizes = {"num_examples": count_examples(arrays), "shard": shard, "num_threads": self.num_input_threads}
        if split == "train":
            return train_stream(make_batch, batch_size=self.batch_size, seed=self.seed, **sizes)
        return eval_stream(make_batch, batch_size=self.eval_batch_size, **sizes)

    def loss(self, outputs: Any, batch: Batch) -> WeightedLoss:
        """(total, weight) whose quotient is Keras's loss of the batch.

        One loss: total = sum of its values, weight = number of values or the sum of their weights. Several losses:
        total = sum over examples and outputs of loss_weights * mean of the output's values, weight = number of
        examples or the sum of their weights.

        Raises:
          UserError: losses, labels or weights do not match the outputs, or the losses have no common divisor.
        """
        terms = self._terms(outputs, batch)
        if len(terms) == 1:
            total, weight = loss_sums(terms[0])
            return WeightedLoss(terms[0].scale * total, weight)
        check_common_divisor(terms)
        sums = [loss_sums_by_example(term) for term in terms]
        total = tf.add_n([term.scale * total for term, (total, _) in zip(terms, sums, strict=True)])
        return WeightedLoss(total, sums[0][1])

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, WeightedValue]:
        """The metrics of the batch by name; with several outputs f'{output}_{metric}', as Keras names them.

        Outputs without names are 'output_0', 'output_1', ...
        """
        if not self.metric_functions:
            return {}
        aligned = self._aligned(outputs, batch.labels, batch.weights)
        by_output = [("", self.metric_functions, *aligned[0])]
        if self._metrics_by_output:
            names = self._names(outputs)
            functions = given_by_output("metric_functions", self.metric_functions, outputs, lambda: names)
            by_output = [
                (f"{name}_", by_metric or {}, *parts)
                for name, by_metric, parts in zip(
                    names or map("output_{}".format, range(len(aligned))), functions, aligned, strict=True
                )
            ]
        elif len(aligned) > 1:
            raise UserError(
                f"metric_functions for {len(aligned)} outputs: each function must be for one output; "
                "pass mappings by output name, as {'output': {'metric': function}}"
            )
        found = [
            (prefix + name, metric_sums(prefix + name, function, labels, output, weights))
            for prefix, functions, output, labels, weights in by_output
            for name, function in functions.items()
        ]
        names = [name for name, _ in found]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"two metrics of different outputs are named {twice!r} (output_metric): rename one")
        return dict(found)

    @property
    def _metrics_by_output(self) -> bool:
        given = self.metric_functions
        return not isinstance(given, Mapping) or any(isinstance(one, Mapping) for one in given.values())

    @functools.cached_property
    def _train_arrays(self) -> Batch:
        return host_tensors(self.train_data)

    @functools.cached_property
    def _eval_arrays(self) -> Batch:
        return host_tensors(self.eval_data)

    @functools.cached_property
    def _output_names(self) -> tuple[str, ...]:
        with tf.init_scope():
            model = self.model if isinstance(self.model, keras.Model) else self.model()
        return output_names_of(model)

    def _names(self, outputs: Any) -> tuple[str, ...]:
        return tuple(outputs) if isinstance(outputs, Mapping) else self._output_names

    def _data(self, split: str) -> Any:
        data = self.train_data if checked_split(split) == "train" else self.eval_data
        if data is None:
            raise UserError(f"{split}_data=None: the split {split!r} has no data; pass {split}_data to OwnTask")
        return data

    def _aligned(self, outputs: Any, labels: Any, weights: Any) -> list[tuple[Any, Any, Any]]:
        """(output, labels, weights or ()) of each output."""

        def find(what: str, given: Any) -> list[Any]:
            return given_by_output(what, given, outputs, lambda: self._names(outputs))

        if is_empty(labels):
            raise UserError(
                "the data have no labels, which the losses and metrics compare with the outputs; pass (features, "
                "labels), a tuple, as train_data and eval_data"
            )
        by_output = [()] * len(flat(outputs)) if is_empty(weights) else find("weights", weights)
        # Without weights, given as None, each example of an output weighs 1.
        by_output = [() if weight is None else weight for weight in by_output]
        return list(zip(flat(outputs), find("labels", labels), by_output, strict=True))

    def _terms(self, outputs: Any, batch: Batch) -> list[Term]:
        names = functools.partial(self._names, outputs)
        losses = given_by_output("losses", self.losses, outputs, names)
        scales = [1.0] * len(losses)
        if self.loss_weights is not None:
            given = given_by_output("loss_weights", self.loss_weights, outputs, names)
            if isinstance(self.loss_weights, Mapping):
                _check_used(names(), losses, given)
            scales = [1.0 if scale is None else scale for scale in given]
        aligned = self._aligned(outputs, batch.labels, batch.weights)
        if isinstance(batch.weights, Mapping):
            self._check_weights(outputs, batch.weights, losses)
        return [
            Term(loss=loss, scale=scale, labels=labels, output=output, weights=weights)
            for loss, scale, (output, labels, weights) in zip(losses, scales, aligned, strict=True)
            if loss is not None
        ]

    def _check_weights(self, outputs: Any, weights: Mapping[str, Any], losses: Sequence[Any]) -> None:
        """Raises UserError for weights of an output without a loss and metrics, which would change nothing."""
        names = self._names(outputs)
        measured = losses
        if self._metrics_by_output:
            measured = given_by_output("metric_functions", self.metric_functions, outputs, lambda: names)
        for name, loss, metrics in zip(names, losses, measured, strict=True):
            if loss is None and not metrics and not is_empty(weights.get(name, ())):
                raise UserError(
                    f"weights for {name!r}: this output has no loss and no metric; omit them, or give it one"
                )


def _is_by_name(functions: Any) -> bool:
    """Whether `functions` is a mapping whose keys are names, of metrics or of outputs."""
    return isinstance(functions, Mapping) and all(isinstance(name, str) for name in functions)


def _check_used(names: Sequence[str], losses: Sequence[Any], loss_weights: Sequence[float | None]) -> None:
    """Raises UserError for a loss weight of an output without a loss, which would change nothing."""
    by_output = zip(names, losses, loss_weights, strict=True)
    without = next((name for name, loss, weight in by_output if loss is None and weight), None)
    if without is not None:
        raise UserError(
            f"loss_weights for {without!r}: this output has no loss; pass one in losses, or omit its weight"
        )
