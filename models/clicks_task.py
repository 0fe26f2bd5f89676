"""Click prediction: trains a DLRM on ids and dense numbers that are drawn at random as needed."""

import dataclasses
import functools
from collections.abc import Mapping

import keras
import tensorflow as tf

from models.data.batch_stream import BatchSlice, eval_stream, train_stream
from models.data.drawn_clicks import DrawnClicks
from models.data.splits import checked_split
from models.field_checks import check_at_least_1
from models.networks.dlrm import dlrm
from models.weighted_sum import weighted_sum
from towers.task import Batch, InputShard, WeightedLoss, WeightedValue


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ClicksTask:
    """A `towers.task.Task`: predicts clicks with a DLRM.

    Attributes:
      clicks: the set of examples.
      batch_size: examples in a global training batch.
      eval_batch_size: examples in a global evaluation batch; None: batch_size.
      width: number of elements in a row of a table.
      seed: seed of the order of the examples.
      num_input_threads: threads that draw batches.
      name: name of the task, for reports.

    Raises:
      UserError: a number is below 1.
    """

    clicks: DrawnClicks
    batch_size: int
    eval_batch_size: int | None = None
    width: int = 16
    seed: int = 0
    num_input_threads: int = 2
    name: str = "clicks"

    # Its examples are checked where they are read, and its network fits them.
    data_is_checked = True

    def __post_init__(self):
        if self.eval_batch_size is None:
            object.__setattr__(self, "eval_batch_size", self.batch_size)
        check_at_least_1(self, "batch_size", "eval_batch_size", "width", "num_input_threads")

    def num_examples(self, split: str) -> int:
        """Number of examples in 'train' or 'eval'."""
        return self.clicks.num_examples(split)

    def build_model(self) -> keras.Model:
        """A new model from the features of a batch to logits [N, 1]."""
        return dlrm(
            table_rows=(self.clicks.num_rows,) * self.clicks.num_tables,
            num_dense=self.clicks.num_dense,
            width=self.width,
        )

    def dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """Batches with features and labels as `DrawnClicks.gather` returns; see `towers.task.Task.dataset`."""
        batches = {
            "make_batch": functools.partial(self._batch, split),
            "num_examples": self.num_examples(split),
            "shard": shard,
            "num_threads": self.num_input_threads,
        }
        if checked_split(split) == "train":
            return train_stream(batch_size=self.batch_size, seed=self.seed, **batches)
        return eval_stream(batch_size=self.eval_batch_size, **batches)

    def loss(self, outputs: tf.Tensor, batch: Batch) -> WeightedLoss:
        """SUM of the examples' sigmoid cross-entropy, in at least float32, and SUM of their weights."""
        logits = _logits(outputs)
        values = tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.cast(batch.labels, logits.dtype), logits=logits)
        return WeightedLoss(*weighted_sum(tf.cast(values, tf.float32), batch.weights))

    def metrics(self, outputs: tf.Tensor, batch: Batch) -> Mapping[str, WeightedValue]:
        """Two metrics by name.

        accuracy: weight of the examples whose probability is on the label's side of 1/2, over all weights.
        calibration: sum of the predicted probabilities over the number of clicks; 1 is best (He et al. 2014).
        """
        logits, clicked = _logits(outputs), tf.cast(batch.labels, tf.float32)
        right = tf.equal(logits > 0, clicked > 0)
        predicted, _ = weighted_sum(tf.cast(tf.sigmoid(logits), tf.float32), batch.weights)
        actual, _ = weighted_sum(clicked, batch.weights)
        return {
            "accuracy": WeightedValue(*weighted_sum(tf.cast(right, tf.float32), batch.weights)),
            "calibration": WeightedValue(predicted, actual),
        }

    def _batch(self, split: str, part: BatchSlice) -> Batch:
        return Batch(*self.clicks.gather(split, part.indices))


def _logits(outputs: tf.Tensor) -> tf.Tensor:
    """[N, 1] outputs as logits [N] in at least float32."""
    logits = tf.squeeze(outputs, axis=1)
    return logits if logits.dtype == tf.float64 else tf.cast(logits, tf.float32)
