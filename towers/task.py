"""What is trained: the types at which models and strategies meet.

A task owns the model, the data and the meaning of its loss. It knows nothing of devices or processes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import keras
import tensorflow as tf

from towers.errors import UserError
from towers.split import boundaries_tensor, checked_shares, even_shares


class WeightedLoss(NamedTuple):
    """The loss of some examples, undivided: division by the weight happens once, after all towers met.

    Attributes:
      total: float32 scalar, SUM of the loss over the examples (or valid tokens).
      weight: float32 scalar, how many examples (or valid tokens) are in the sum.
    """

    total: tf.Tensor
    weight: tf.Tensor


class WeightedValue(NamedTuple):
    """A metric of some examples, undivided, as `WeightedLoss`."""

    total: tf.Tensor
    weight: tf.Tensor


class Batch(NamedTuple):
    """A batch as the model, the loss and the metrics see it; every leaf has the examples as dimension 0.

    Attributes:
      features: what the model is called with (a tensor or any structure of them).
      labels: what the loss compares the outputs with (tensor, structure, or ()).
      weights: weight of each example, float32 [N], or () for 1 each.
    """

    features: Any
    labels: Any = ()
    weights: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputShard:
    """Which part of the stream of global batches a reader wants.

    Microbatches divide a global batch first and readers divide each of them, so that a microbatch is the same
    examples whatever the number of readers.

    Attributes:
      index, count: this reader's place among the readers that divide each (micro)batch.
      shares: how much of it each reader takes, one number a reader; None is equal parts.
      first_batch: number of the global batch to begin with (a resumed run continues here).
      stride: every so many-th batch from there on is wanted; readers that share no batch take turns by it.
      microbatch, num_microbatches: which of the microbatches is wanted.
    """

    index: int = 0
    count: int = 1
    shares: tuple[float, ...] | None = None
    first_batch: int = 0
    stride: int = 1
    microbatch: int = 0
    num_microbatches: int = 1

    def __post_init__(self):
        if not 0 <= self.index < self.count:
            raise UserError(f"input shard {self.index} of {self.count}: the index counts from 0 to count - 1")
        checked_shares(self.shares, self.count, "shares", of="reader")
        if not 0 <= self.microbatch < self.num_microbatches:
            raise UserError(f"microbatch {self.microbatch} of {self.num_microbatches}: they are counted from 0")
        if self.first_batch < 0:
            raise UserError(f"first_batch={self.first_batch}: batches are counted from 0")
        if self.stride < 1:
            raise UserError(f"stride={self.stride}: the next batch is at least 1 further")

    def bounds(self, num_examples: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Where in a global batch of so many examples this part begins and ends: int32 scalars."""
        micro = boundaries_tensor(num_examples, even_shares(self.num_microbatches))
        start, length = micro[self.microbatch], micro[self.microbatch + 1] - micro[self.microbatch]
        ends = start + boundaries_tensor(length, checked_shares(self.shares, self.count, "shares", of="reader"))
        return ends[self.index], ends[self.index + 1]


@runtime_checkable
class Task(Protocol):
    """What a strategy needs to know of the work. `models` has ready ones; anything with this face will do."""

    @property
    def batch_size(self) -> int:
        """Examples in a full global batch, over all towers and workers."""

    def num_examples(self, split: str) -> int | None:
        """Examples in 'train' or 'eval'; None when not known in advance."""

    def build_model(self) -> keras.Model:
        """A new, built model under Keras's current dtype policy; called for every copy that is needed."""

    def dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """Batches of `split`, each element a `Batch`, (features, labels) or (features, labels, weights).

        'train' never ends: epochs follow each other, the last batch of an epoch holds what is left, and
        global batch k is the same examples whoever reads it. 'eval' is one pass, in order, nothing dropped.
        A reader's part of a short batch may be empty.
        """

    def loss(self, outputs: Any, batch: Batch) -> WeightedLoss:
        """SUM of the loss over the batch's examples, and their weight."""

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, WeightedValue]:
        """Undivided metrics by name."""


def as_batch(element: Any) -> Batch:
    """An element as a `Batch`: it is one, or (features, labels), (features, labels, weights) or features."""
    if isinstance(element, Batch):
        return element
    if isinstance(element, tuple):
        if 1 <= len(element) <= 3:
            return Batch(*element)
        raise UserError(
            f"a dataset element is a tuple of {len(element)}: "
            "give (features, labels) or (features, labels, weights); several inputs go in a dict or list"
        )
    return Batch(element)


def batch_length(batch: Batch) -> tf.Tensor:
    """Number of examples in a batch, an int32 scalar (dimension 0 of its first leaf)."""
    return tf.shape(tf.nest.flatten(batch.features)[0])[0]


def steps_per_epoch(task: Task) -> int | None:
    """Batches in one pass over the training examples, a short last one included; None when not known."""
    examples = task.num_examples("train")
    return None if examples is None else -(-examples // task.batch_size)
