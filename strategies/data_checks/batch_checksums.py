"""Checksums of a split's first batches: whether all processes, and repeated readings, get the same batches."""

import collections
import dataclasses
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from strategies.data_checks.data_errors import readable_input
from towers.errors import UserError
from towers.task import Batch, InputShard, Task, as_batch

# Number of first batches of each split that are compared.
NUM_COMPARED = 4
KEEPS_ORDER_ADVICE = "use shuffle(..., seed=1, reshuffle_each_iteration=False)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchChecksums:
    """Attributes:
    examples: for each batch a checksum of its labels and weights, or of its features if there are none. It
      identifies the batch's examples: random augmentation seldom changes labels.
    features: for each batch a checksum of its features; () if they differ between readings.
    keeps_order: whether a second reading had the same examples in the same order.
    """

    examples: Sequence[int] = ()
    features: Sequence[int] = ()
    keeps_order: bool = True

    @classmethod
    def of(cls, first: Sequence[Batch], second: Sequence[Batch] | None = None) -> "BatchChecksums":
        """Args:
        first: the first batches of a split.
        second: the same, read once more; None if they were read once.
        """
        examples, features = _examples(first), [_checksum(batch.features) for batch in first]
        if second is None:
            return cls(examples=examples, features=features)
        are_same = features == [_checksum(batch.features) for batch in second]
        keeps_order = examples == _examples(second) and (are_same or not _are_moved(first, second))
        return cls(examples=examples, features=features if are_same else (), keeps_order=keeps_order)

    def numbers(self, count: int) -> np.ndarray:
        """All attributes as float64 [1 + 2 * count], for at most `count` batches; inverse of `from_numbers`."""
        examples, features = (
            np.pad(np.array(found, np.float64), (0, count - len(found)), constant_values=-1)
            for found in (self.examples, self.features)
        )
        return np.concatenate([[self.keeps_order], examples, features])

    @classmethod
    def from_numbers(cls, numbers: np.ndarray) -> "BatchChecksums":
        keeps_order, *rest = numbers.tolist()
        examples, features = ([int(one) for one in found if one >= 0] for found in np.split(np.array(rest), 2))
        return cls(examples=examples, features=features, keeps_order=bool(keeps_order))


def batch_checksums(task: Task, split: str) -> BatchChecksums:
    """Checksums of a split's first batches, which are read twice; empty for a task that checks its own data.

    Raises:
      UserError: the data can't be read, or there are none.
    """
    if getattr(task, "data_is_checked", False):
        return BatchChecksums()
    with tf.device("/device:CPU:0"):
        first, second = (first_batches(task, split, NUM_COMPARED) for _ in range(2))
        return BatchChecksums.of(first, second)


def first_batches(task: Task, split: str, count: int) -> list[Batch]:
    """The first batches of a split; raises as `batch_checksums`."""
    dataset = task.dataset(split, InputShard())
    if split == "eval" and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UserError(
            "the 'eval' data never end: an evaluation reads each example once; remove repeat(), or add "
            ".take(number of batches)"
        )
    with readable_input(split, "its first batches"):
        found = [as_batch(element) for element in dataset.take(count)]
    if not found:
        raise UserError(f"the {split!r} split is empty: it needs at least one example")
    return found


def _examples(batches: Iterable[Batch]) -> list[int]:
    """Checksums that augmentation does not change."""
    telling = [(batch.labels, batch.weights) if _flat(batch.labels) else batch.features for batch in batches]
    return [_checksum(parts) for parts in telling]


def _flat(structure: Any) -> list:
    return tf.nest.flatten(structure, expand_composites=True)


def _checksum(structure: Any) -> int:
    """CRC-32 of all tensors."""
    crc = 0
    for tensor in _flat(structure):
        array = np.asarray(tensor)
        # An array of strings holds addresses, not the strings.
        content = b"\0".join(np.ravel(array)) if array.dtype.hasobject else np.ascontiguousarray(array)
        crc = zlib.crc32(content, crc)
    return crc


def _are_moved(first: Sequence[Batch], second: Sequence[Batch]) -> bool:
    """Whether an example has another position in the second reading. Augmented ones are in one reading only."""
    before, after = (_places(batches) for batches in (first, second))
    return any(after.get(example, place) != place for example, place in before.items())


def _places(batches: Sequence[Batch]) -> dict[int, int]:
    """The positions of the examples that occur once, by a checksum of their features."""
    found = []
    for batch in batches:
        tensors = _flat(batch.features)
        length = len(tensors[0])
        # A custom task may yield anything.
        if all(tensor.shape.rank and len(tensor) == length for tensor in tensors):
            arrays = [np.asarray(tensor) for tensor in tensors]
            found += [_checksum([array[index] for array in arrays]) for index in range(length)]
    count = collections.Counter(found)
    return {example: place for place, example in enumerate(found) if count[example] == 1}
