"""Features that towers prepare on their own devices: what the host sends is smaller than what the model reads.

    host:   Batch(Unprepared(pixels uint8, draws), labels)  ->  tower:  Batch(features float32, labels)

A task may offer it (`PreparesOnDevice`). Which examples are in a batch, and all random draws, are the host's.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

from towers.input.wide_integers import narrowed
from towers.task import Batch, InputShard, Task


class Unprepared(NamedTuple):
    """The features of a batch before the task's `prepared`.

    Attributes:
      values: a structure of tensors, in the form that the task chooses. Dimension 0 of each is the examples.
    """

    values: Any


@runtime_checkable
class PreparesOnDevice(Protocol):
    """What a task has besides `towers.task.Task` if towers can prepare its features."""

    def unprepared_dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """As `Task.dataset`, with `Unprepared` features."""

    def prepared(self, values: Any) -> Any:
        """The features that `Task.dataset` has, from the values of `Unprepared` ones. For graphs on any device."""


def read_dataset(task: Task, split: str, shard: InputShard, *, unprepared: bool) -> tf.data.Dataset:
    """The task's dataset; with `unprepared` the one whose features towers prepare, if the task has one."""
    if unprepared and isinstance(task, PreparesOnDevice):
        return task.unprepared_dataset(split, shard)
    return task.dataset(split, shard)


def with_features(task: Task, batch: Batch, spec: Batch | None = None) -> Batch:
    """The batch that the model and the loss read, computed on the current device if the batch is another yet.

    Args:
      task: prepares features.
      batch: as it came to the device.
      spec: with the dtypes of the task's dataset, of which `wide_integers` may have changed some; None for those
        of the batch.
    """
    with tf.name_scope("prepare"):
        if spec is not None:
            batch = narrowed(batch, spec)
        if isinstance(batch.features, Unprepared):
            batch = batch._replace(features=task.prepared(batch.features.values))
        return batch
