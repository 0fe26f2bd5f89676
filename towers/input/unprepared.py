"""Features that towers prepare on their own devices, so that the host sends less than the model reads.

    host:   Batch(Unprepared(pixels uint8, draws), labels)  ->  tower:  Batch(features float32, labels)

A task may support this (`PreparesOnDevice`). The host still chooses the examples and makes all random draws.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

from towers.input.wide_integers import narrowed
from towers.task import Batch, InputShard, Task


class Unprepared(NamedTuple):
    """The features of a batch before the task's `prepared`.

    Attributes:
      values: a structure of tensors, as the task chooses. Dimension 0 of each is the examples.
    """

    values: Any


@runtime_checkable
class PreparesOnDevice(Protocol):
    """What a task implements besides `towers.task.Task` if towers can prepare its features."""

    def unprepared_dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """As `Task.dataset`, with `Unprepared` features."""

    def prepared(self, values: Any) -> Any:
        """The features as in `Task.dataset`, from the values of `Unprepared`. For graphs on any device."""


def read_dataset(task: Task, split: str, shard: InputShard, *, unprepared: bool) -> tf.data.Dataset:
    """The task's dataset; with `unprepared` the one whose features towers prepare, if the task has one."""
    if unprepared and isinstance(task, PreparesOnDevice):
        return task.unprepared_dataset(split, shard)
    return task.dataset(split, shard)


def with_features(task: Task, batch: Batch, spec: Batch | None = None) -> Batch:
    """The batch as the model and the loss read it; prepares its features and narrows its integers if needed.

    Args:
      task: prepares features.
      batch: the batch as it reached the device.
      spec: spec with the dtypes of the task's dataset, some of which `wide_integers` may have changed; None to
        keep those of the batch.
    """
    with tf.name_scope("prepare"):
        if spec is not None:
            batch = narrowed(batch, spec)
        if isinstance(batch.features, Unprepared):
            batch = batch._replace(features=task.prepared(batch.features.values))
        return batch
