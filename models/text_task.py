"""Language modelling: trains a transformer to predict the next token of texts, drawn at random as needed."""

import dataclasses
import functools
from collections.abc import Mapping

import keras
import tensorflow as tf

from models.data.batch_stream import BatchSlice, eval_stream, train_stream
from models.data.drawn_text import NO_TOKEN, DrawnText
from models.data.splits import checked_split
from models.field_checks import check_at_least_1
from models.networks.transformer import TransformerSize, transformer
from models.weighted_sum import weighted_sum
from towers.errors import UserError
from towers.task import Batch, InputShard, WeightedLoss, WeightedValue


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextTask:
    """A `towers.task.Task`: predicts next tokens. An example is a text; its weight is its number of tokens.

    Attributes:
      text: the set of texts.
      size: sizes of the transformer.
      batch_size: texts in a global training batch.
      eval_batch_size: texts in a global evaluation batch; None: batch_size.
      dropout: dropout rate of the transformer, 0 to below 1.
      seed: seed of the order of the texts.
      num_input_threads: threads that draw batches.
      name: name of the task, for reports.

    Raises:
      UserError: a number is out of range.
    """

    text: DrawnText
    size: TransformerSize
    batch_size: int
    eval_batch_size: int | None = None
    dropout: float = 0.0
    seed: int = 0
    num_input_threads: int = 2
    name: str = "text"

    # Its examples are checked where they are read, and its network fits them.
    data_is_checked = True

    def __post_init__(self):
        if self.eval_batch_size is None:
            object.__setattr__(self, "eval_batch_size", self.batch_size)
        check_at_least_1(self, "batch_size", "eval_batch_size", "num_input_threads")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout={self.dropout}: must be a rate from 0 to below 1; use 0.1 or omit it")

    def num_examples(self, split: str) -> int:
        """Number of texts in 'train' or 'eval'."""
        return self.text.num_examples(split)

    def build_model(self) -> keras.Model:
        """A new model from tokens int32 [N, T] to logits [N, T, num_tokens]."""
        return transformer(
            self.size, num_tokens=self.text.num_tokens, length=self.text.length, dropout=self.dropout
        )

    def dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """Batches with features and labels as `DrawnText.gather` returns; see `towers.task.Task.dataset`."""
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
        """SUM of the softmax cross-entropy over the valid tokens, in nats, and SUM of the tokens' weights.

        A token is valid if its label is not 0. It has the weight of its text, by default 1.
        """
        logits = outputs if outputs.dtype == tf.float64 else tf.cast(outputs, tf.float32)
        labels = batch.labels
        # As a vector: with more dimensions TensorFlow checks shapes in the graph, where the host waits for a GPU.
        values = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=tf.reshape(labels, [-1]), logits=tf.reshape(logits, [-1, logits.shape[-1]])
        )
        values = tf.reshape(values, tf.shape(labels))
        return WeightedLoss(*_sum_over_tokens(tf.cast(values, tf.float32), batch))

    def metrics(self, outputs: tf.Tensor, batch: Batch) -> Mapping[str, WeightedValue]:
        """{'accuracy': (weight of the tokens whose largest logit is the label's, weight of the valid tokens)}."""
        right = tf.equal(tf.argmax(outputs, axis=-1), batch.labels)
        return {"accuracy": WeightedValue(*_sum_over_tokens(tf.cast(right, tf.float32), batch))}

    def _batch(self, split: str, part: BatchSlice) -> Batch:
        return Batch(*self.text.gather(split, part.indices))


def _sum_over_tokens(values: tf.Tensor, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
    """Weighted sum of float32 [N, T] `values` over the valid tokens, and the sum of the tokens' weights."""
    weights = tf.cast(tf.not_equal(batch.labels, NO_TOKEN), tf.float32)
    if not isinstance(batch.weights, tuple):
        weights *= tf.cast(batch.weights, tf.float32)[:, None]
    return weighted_sum(values, weights)
