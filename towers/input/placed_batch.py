"""Batches that are already on the towers' devices, and functions for batches of any kind.

Batch         in the host's memory; the step cuts it and sends each tower its part
PlacedBatch   cut, each part on its tower's device
tuple         of either: microbatches
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.task import Batch, batch_length


class PlacedBatch(NamedTuple):
    """A (micro)batch in parts.

    Attributes:
      parts: each tower's part, on its device, with int64 in place of int32; an idle tower has some example.
      activities: float32 scalars, 0.0 for an idle tower, otherwise 1.0.
      examples: int32 scalar in the host's memory, number of examples in the (micro)batch.
    """

    parts: tuple[Batch, ...]
    activities: tuple[tf.Tensor, ...]
    examples: tf.Tensor


def parts_of(batch: Any) -> list[Batch]:
    """The `Batch`es in `batch`: itself, its parts, or those of all its microbatches."""
    if isinstance(batch, Batch):
        return [batch]
    return [part for one in (batch.parts if isinstance(batch, PlacedBatch) else batch) for part in parts_of(one)]


def features_by_device(batch: Any, host: str, towers: Sequence[str]) -> list[tuple[str, Any]]:
    """The features of each of `parts_of(batch)`, and the device that has them.

    Args:
      batch: a batch, a placed batch, or a tuple of either.
      host: the device of a batch that is not placed.
      towers: the device of each tower.
    """
    if isinstance(batch, Batch):
        return [(host, batch.features)]
    if isinstance(batch, PlacedBatch):
        return [(device, part.features) for device, part in zip(towers, batch.parts, strict=True)]
    return [found for one in batch for found in features_by_device(one, host, towers)]


def examples_of(batch: Any) -> tf.Tensor:
    """int32 scalar: the number of examples, over all microbatches."""
    if isinstance(batch, Batch):
        return batch_length(batch)
    return batch.examples if isinstance(batch, PlacedBatch) else tf.add_n([examples_of(one) for one in batch])
