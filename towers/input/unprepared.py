"""Features that towers prepare on their own devices: what the host sends is smaller than what the model reads.

    host:   Batch(Unprepared(pixels uint8, draws), labels)  ->  tower:  Batch(features float32, labels)

A task may offer it (`PreparesOnDevice`). Which examples are in a batch, and all random draws, are the host's.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

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


def with_features(task: Task, batch: Batch) -> Batch:
    """The batch with the features that the model reads, computed on the current device if they are not yet."""
    if not isinstance(batch.features, Unprepared):
        return batch
    with tf.name_scope("prepare"):
        return batch._replace(features=task.prepared(batch.features.values))
