"""Input on the towers' devices: each tower's part of the next step is there before the step begins.

    batch k + 1, cut on the host -> part 0 -> GPU:0     while the towers compute batch k
                                    part 1 -> GPU:1

TensorFlow copies in its own threads (`device_iterator.py`). The host gets the number of examples as an element of
its own: it would get a GPU's only after the steps before. If a part is the whole batch, its shape has that number,
which halves the host's work for each batch. Parts hold int64 in place of int32 (`wide_integers.py`).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from towers import split
from towers.devices import HOST
from towers.input.device_iterator import device_iterator
from towers.input.placed_batch import PlacedBatch
from towers.input.tower_parts import TowerParts, microbatch, open_length
from towers.input.wide_integers import widened, widened_spec
from towers.task import Batch, batch_length, examples_between


class _OwnPart(NamedTuple):
    """One tower's part of a (micro)batch, its activity, and the number of examples in the whole."""

    part: Batch
    activity: tf.Tensor
    examples: tf.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlacedInput:
    """Cuts batches as the step would, and copies the parts to the towers' devices one step ahead.

    Attributes:
      parts: how the towers of this process divide a (micro)batch.
      devices: the device of each tower.
      accumulation: number of microbatches that a batch is cut into first; the engine makes a call for each.
      microbatches: number of microbatches that a tower computes in each such call; None for towers that compute
        one. If the batches already are this process's microbatches, `accumulation` is 1 and `microbatches` None.
      ahead: number of parts that wait on each device, besides the one in use.
    """

    parts: TowerParts
    devices: tuple[str, ...]
    accumulation: int = 1
    microbatches: int | None = None
    ahead: int = 1

    def spec(self, batch_spec: Any) -> Any:
        """The spec of what `batches` yields, from the spec of a batch, or of a tuple of microbatches."""
        if not isinstance(batch_spec, Batch):
            return tuple(map(self.spec, batch_spec))
        count = len(self.devices)
        scalars = (tf.TensorSpec([], tf.float32),) * count
        part = widened_spec(open_length(batch_spec))
        of_call = PlacedBatch((part,) * count, scalars, tf.TensorSpec([], tf.int32))
        of_call = of_call if self.microbatches is None else (of_call,) * self.microbatches
        return of_call if self.accumulation == 1 else (of_call,) * self.accumulation

    def batches(self, dataset: tf.data.Dataset) -> Iterator[Any]:
        """The batches of a dataset as `PlacedBatch`, or as (nested) tuples of these for microbatches."""
        is_whole = self._is_whole(dataset.element_spec)

        @tf.autograph.experimental.do_not_convert
        def cut(*given) -> tf.data.Dataset:
            # tf.data passes the microbatches of a tuple one by one.
            batch = given[0] if isinstance(dataset.element_spec, Batch) else given
            found = [self._own(batch, tower) for tower in range(len(self.devices))]
            if not is_whole:
                found.append(_without_parts(found[0]))
            first, *others = map(tf.data.Dataset.from_tensors, found)
            for other in others:
                first = first.concatenate(other)
            return first

        devices = self.devices if is_whole else (*self.devices, HOST)
        placed = device_iterator(dataset.flat_map(cut), devices, self.ahead)
        return map(_of_whole if is_whole else _together, placed)

    def _is_whole(self, element_spec: Any) -> bool:
        """Whether the only part is the batch itself, and never a stand-in for an empty one."""
        is_alone = len(self.devices) == len(self.parts.all_shares) == 1
        dense = all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(element_spec))
        is_undivided = self.accumulation == 1 and self.microbatches is None and isinstance(element_spec, Batch)
        return is_alone and is_undivided and dense

    def _own(self, batch: Any, tower: int) -> Any:
        if not isinstance(batch, Batch):
            return tuple(self._own(one, tower) for one in batch)
        if self.accumulation == 1:
            return self._of_call(batch, tower, 0)
        return tuple(self._of_call(batch, tower, call) for call in range(self.accumulation))

    def _of_call(self, batch: Batch, tower: int, call: int) -> Any:
        if self.microbatches is None:
            own = microbatch(batch, call, self.accumulation)
            return _own_part(*self.parts.part(own, tower), batch_length(own))
        # All microbatches of a batch are cut at once, as one device cuts them.
        first, count = call * self.microbatches, self.accumulation * self.microbatches
        return tuple(
            _own_part(
                *self.parts.part_of_microbatch(batch, tower, index, count), _num_examples(batch, index, count)
            )
            for index in range(first, first + self.microbatches)
        )


def can_be_placed(batch_spec: Any) -> bool:
    """Whether all tensors of a batch can be on any device; strings can be on the host only."""
    return all(spec.dtype != tf.string for spec in tf.nest.flatten(batch_spec))


def _num_examples(batch: Batch, microbatch_index: int, count: int) -> tf.Tensor:
    begin, end = split.bounds_in_graph(batch_length(batch), split.even_shares(count), microbatch_index)
    return end - begin


def _own_part(part: Batch, activity: tf.Tensor, examples: tf.Tensor) -> _OwnPart:
    return _OwnPart(widened(part), activity, examples)


def _without_parts(own: Any) -> Any:
    """The same without the examples, which the host does not need."""
    if not isinstance(own, _OwnPart):
        return tuple(map(_without_parts, own))
    return own._replace(part=examples_between(own.part, 0, 0))


def _of_whole(by_tower: list) -> PlacedBatch:
    """The placed batch whose only part is the whole batch."""
    (own,) = by_tower
    first, *_ = tf.nest.flatten(own.part.features)
    with tf.device(HOST):
        examples = tf.constant(first.shape[0], tf.int32)
    return PlacedBatch((own.part,), (own.activity,), examples)


def _together(by_tower: list) -> Any:
    """One placed batch of what each tower and the host got."""
    if not isinstance(by_tower[0], _OwnPart):
        return tuple(_together(list(of_micro)) for of_micro in zip(*by_tower, strict=True))
    *of_towers, of_host = by_tower
    parts, activities, _ = zip(*of_towers, strict=True)
    return PlacedBatch(parts, activities, of_host.examples)
