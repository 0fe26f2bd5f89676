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
from typing import Any

import keras
import tensorflow as tf

from models.data.batch_stream import BatchSlice, eval_stream, train_stream
from models.data.own_data import checked_batch_size, count_examples, dataset_stream, host_tensors
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
from models.model_outputs import flat, given_by_output, map_leaves, output_names_of
from towers.errors import UserError
from towers.task import Batch, InputShard, WeightedLoss, WeightedValue, as_batch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OwnTask:
    """Implements `towers.task.Task` over what the user brings.

    Arrays are shuffled as `models.data.batch_stream` does. A tf.data dataset gives batches as it is: it is
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
        object.__setattr__(self, "losses", map_leaves(checked_loss, self.losses))
        map_leaves(check_metric, self.metric_functions)
        for data in (self.train_data, self.eval_data):
            if data is not None and not isinstance(data, tf.data.Dataset):
                count_examples(as_batch(data))
        batch_size = checked_batch_size(self.train_data, self.batch_size)
        object.__setattr__(self, "batch_size", batch_size)
        object.__setattr__(self, "eval_batch_size", self.eval_batch_size or batch_size)

    def num_examples(self, split: str) -> int | None:
        """Examples in 'train' or 'eval'; None for a tf.data dataset, which does not say."""
        data = self._data(split)
        return None if isinstance(data, tf.data.Dataset) else count_examples(as_batch(data))

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
        self.__dict__.setdefault("_output_names", output_names_of(model))
        return model

    def dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """Batches of `split` as `towers.task.Task.dataset` says."""
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
        """Sums whose quotient is Keras's loss of the batch.

        One loss: the sum of its values, and how many values (or their weights) there are. Several: for each
        example the mean of each output's values, times its loss_weights, and the number of examples.

        Raises:
          UserError: losses, labels or weights do not fit the outputs, or have no common divisor.
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
        """The metrics of the batch by name; with several outputs by 'output_name', as Keras names them."""
        if not self.metric_functions:
            return {}
        aligned = self._aligned(outputs, batch.labels, batch.weights)
        by_output = [("", self.metric_functions, *aligned[0])]
        if any(isinstance(functions, Mapping) for functions in self.metric_functions.values()):
            names = self._names(outputs)
            functions = given_by_output("metric_functions", self.metric_functions, outputs, lambda: names)
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
            prefix + name: metric_sums(function, labels, output, weights)
            for prefix, functions, output, labels, weights in by_output
            for name, function in functions.items()
        }

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
        if split not in ("train", "eval"):
            raise UserError(f"split {split!r}: a task has 'train' and 'eval'; name one of them")
        data = self.train_data if split == "train" else self.eval_data
        if data is None:
            raise UserError(f"{split}_data=None: there is nothing to read; pass {split}_data to OwnTask")
        return data

    def _aligned(self, outputs: Any, labels: Any, weights: Any) -> list[tuple[Any, Any, Any]]:
        """(output, labels, weights or ()) of each output."""

        def find(what: str, given: Any) -> list[Any]:
            return given_by_output(what, given, outputs, lambda: self._names(outputs))

        of_weights = [()] * len(flat(outputs)) if is_empty(weights) else find("weights", weights)
        # What is left out by output, as None, weighs 1.
        of_weights = [() if weight is None else weight for weight in of_weights]
        return list(zip(flat(outputs), find("labels", labels), of_weights, strict=True))

    def _terms(self, outputs: Any, batch: Batch) -> list[Term]:
        names = functools.partial(self._names, outputs)
        losses = given_by_output("losses", self.losses, outputs, names)
        scales = [1.0] * len(losses)
        if self.loss_weights is not None:
            scales = given_by_output("loss_weights", self.loss_weights, outputs, names)
        aligned = self._aligned(outputs, batch.labels, batch.weights)
        return [
            Term(loss=loss, scale=scale, labels=labels, output=output, weights=weights)
            for loss, scale, (output, labels, weights) in zip(losses, scales, aligned, strict=True)
            if loss is not None
        ]


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
