"""What is trained: the types that `models` implements and `strategies` uses.

A task owns the model, the data and the meaning of its loss. It knows nothing of devices or processes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import keras
import tensorflow as tf

from towers.errors import UserError, check_kind
from towers.split import bounds_in_graph, checked_shares, even_shares


class WeightedLoss(NamedTuple):
    """The loss of some examples, undivided: the one division by the weight follows the sum over all towers.

    Attributes:
      total: float32 scalar, SUM of the loss over the examples (or valid tokens).
      weight: float32 scalar, number of examples (or valid tokens) in the sum.
    """

    total: tf.Tensor
    weight: tf.Tensor


class WeightedValue(NamedTuple):
    """A metric of some examples, undivided, as `WeightedLoss`."""

    total: tf.Tensor
    weight: tf.Tensor


class Batch(NamedTuple):
    """A batch as the model, the loss and the metrics see it. Dimension 0 of every tensor is the examples.

    Attributes:
      features: the model's inputs, a tensor or any structure of tensors.
      labels: the loss compares the outputs with them; a tensor, a structure, or () for none.
      weights: weight of each example, float32 [N]; () for 1 each.
    """

    features: Any
    labels: Any = ()
    weights: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputShard:
    """The part of the stream of global batches that a reader gets.

    A global batch is divided into microbatches first, and each of these between the readers. So a microbatch has
    the same examples for any number of readers.

    Attributes:
      index, count: index of this reader, and number of readers that divide each (micro)batch.
      shares: relative sizes of the readers' parts; None for equal parts.
      first_batch: index of the first global batch (a resumed run starts there).
      stride: this reader gets every `stride`-th batch from `first_batch` on. Readers that share no batch take
        turns.
      microbatch, num_microbatches: index of the microbatch, and number of microbatches of a global batch.

    Raises:
      UserError: an index is not below its count, a number is out of range, or shares don't fit `count`.
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
            raise UserError(
                f"microbatch {self.microbatch} of {self.num_microbatches}: the index counts from 0 to "
                "num_microbatches - 1"
            )
        if self.first_batch < 0:
            raise UserError(f"first_batch={self.first_batch}: batches are counted from 0")
        if self.stride < 1:
            raise UserError(f"stride={self.stride}: it must be at least 1; 1 reads every batch")

    def bounds(self, num_examples: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """First example of this part and first one after it, in a global batch of that size: int32 scalars."""
        shares = checked_shares(self.shares, self.count, "shares", of="reader")
        if self.count == self.num_microbatches == 1:
            return tf.constant(0), tf.convert_to_tensor(num_examples)
        start, after = bounds_in_graph(num_examples, even_shares(self.num_microbatches), self.microbatch)
        begin, end = bounds_in_graph(after - start, shares, self.index)
        return tf.convert_to_tensor(start + begin), start + end


@runtime_checkable
class Task(Protocol):
    """What a strategy needs to know of the work. `models` has ready tasks; any object with these methods works.

    Before training, the first batch of each split is computed as a check, unless the task has a true attribute
    `data_is_checked`. A task whose evaluation batches have another size than those of training may say so in an
    attribute `eval_batch_size`: kernels are chosen by it, and smaller batches filled up to it. A task that knows
    only the number of batches of an epoch, not of examples, may give it as `batches_per_epoch`.
    """

    @property
    def batch_size(self) -> int:
        """Number of examples in a full global batch, over all towers and workers."""

    def num_examples(self, split: str) -> int | None:
        """Number of examples in 'train' or 'eval'; None if it is not known in advance.

        0 for 'eval' says that there is no evaluation data: nothing is evaluated.
        """

    def build_model(self) -> keras.Model:
        """A new, built model under Keras's current dtype policy. Called several times."""

    def dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """Batches of `split`, each element a `Batch`, (features, labels) or (features, labels, weights).

        'train' never ends: epochs follow each other, and the last batch of an epoch may be shorter. Global batch k
        has the same examples for every reader. 'eval' is one pass in order, without dropping an example. A
        reader's part of a short batch may be empty.
        """

    def loss(self, outputs: Any, batch: Batch) -> WeightedLoss:
        """SUM of the loss over the batch's examples, and their weight."""

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, WeightedValue]:
        """Undivided metrics by name."""


def check_task(task: Any) -> None:
    """Raises UserError if `task` is not a task (but, for example, a model)."""
    # From Python 3.12 on, isinstance would not find methods that a task provides by __getattr__.
    methods = ("num_examples", "build_model", "dataset", "loss", "metrics")
    if isinstance(task, type) or not all(hasattr(task, name) for name in methods):
        check_kind(
            "task", task, Task, "put a model and its data into one: models.own_task.OwnTask(model=..., ...)"
        )


def as_batch(element: Any, what: str = "a dataset element") -> Batch:
    """A dataset's element as a `Batch`.

    Args:
      element: a `Batch`, features, (features, labels) or (features, labels, weights).
      what: name of the element in messages.

    Raises:
      UserError: a tuple of another length.
    """
    if isinstance(element, Batch):
        return element
    if isinstance(element, tuple):
        if 1 <= len(element) <= 3:
            return Batch(*element)
        raise UserError(
            f"{what} is a tuple of {len(element)}: it must be (features, labels) or "
            "(features, labels, weights); put several inputs into a dict or list"
        )
    return Batch(element)


def batch_length(batch: Batch) -> tf.Tensor:
    """Number of examples in a batch, an int32 scalar."""
    return length(tf.nest.flatten(batch.features)[0])


def length(tensor: tf.Tensor) -> tf.Tensor:
    """Dimension 0, an int32 scalar; the number of dimensions must be known."""
    return tf.unstack(tf.shape(tensor))[0]


def examples_between(batch: Batch, begin: int | tf.Tensor, end: int | tf.Tensor) -> Batch:
    """The examples from `begin` on, those from `end` on left out."""
    # What `tensor[begin:end]` does in up to nine operations, with the bounds packed once for all tensors. All
    # towers and microbatches run it: before, cutting was 14% of the operations that 650 tests traced, and tests
    # of one process now take 0.87 of the CPU time. (`tf.shape(x)[0]` makes five operations, `length` two.)
    begin, end, stride = (tf.stack([bound]) for bound in (begin, end, 1))
    return tf.nest.map_structure(lambda tensor: tf.strided_slice(tensor, begin, end, stride), batch)


def evaluation_batch_size(task: Task) -> int:
    """Number of examples in a full evaluation batch, as far as the task says."""
    return getattr(task, "eval_batch_size", None) or task.batch_size


def steps_per_epoch(task: Task) -> int | None:
    """Number of batches in one pass over the training examples, a short last batch included; None if unknown."""
    examples = task.num_examples("train")
    if examples is None:
        return getattr(task, "batches_per_epoch", None)
    return -(-examples // task.batch_size)
