"""Which examples of a batch each tower computes.

batch  ->  microbatches, one after another  ->  a part for each tower
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from towers import split
from towers.input.placed_batch import PlacedBatch
from towers.task import Batch, batch_length, examples_between


def open_length(element_spec) -> Batch:
    """The spec of a dataset's batches with an unknown dimension 0, so that a shorter last batch fits the graph."""
    return tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype), element_spec)


def microbatch(batch: Batch, index: int | tf.Tensor, count: int) -> Batch:
    """Microbatch `index` of `count`. The microbatches in order are the batch, whatever its length."""
    if count == 1:
        return batch
    return examples_between(batch, *split.bounds_in_graph(batch_length(batch), split.even_shares(count), index))


def part(batch: Batch, tower: int | tf.Tensor, shares: Sequence[float]) -> tuple[Batch, tf.Tensor]:
    """A tower's part of a batch that is not empty, and its activity: 1.0, or 0.0 if there is no example for it.

    An idle tower gets the first example, because some kernels fail on an empty tensor. Its result has weight 0.
    """
    if len(shares) == 1:
        return batch, tf.constant(1.0)
    begin, end = split.bounds_in_graph(batch_length(batch), shares, tower)
    if isinstance(begin, int):
        # Part 0 is never empty.
        return examples_between(batch, begin, end), tf.constant(1.0)
    has_some = begin < end
    given = examples_between(batch, tf.where(has_some, begin, 0), tf.where(has_some, end, 1))
    return given, tf.cast(has_some, tf.float32)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TowerParts:
    """How the towers of this process divide the (micro)batches that it gets.

    Attributes:
      shares: relative sizes of the parts of this process's towers.
      all_shares: shares of all towers of a step, over all processes, in the order of their parts.
      first_tower: index of this process's first tower among all towers of a step.
      begin: index, among this process's towers, of the tower that is `tower=0` in `part` and `pass_index`.
      stand_in: a batch of one example, as arrays, for the towers of a process whose part of the batch is empty;
        None if this process always gets an example.
    """

    shares: tuple[float, ...]
    all_shares: tuple[float, ...]
    first_tower: int | tf.Tensor = 0
    begin: int = 0
    stand_in: Batch | None = None

    @classmethod
    def of_one_process(cls, num_towers: int, shares: Sequence[float] | None = None) -> "TowerParts":
        """`TowerParts` if all towers of a step are in this process.

        Args:
          num_towers: number of towers.
          shares: relative sizes of their parts; None for equal parts.

        Raises:
          UserError: shares that don't fit the towers.
        """
        shares = split.checked_shares(shares, num_towers, "tower_shares")
        return cls(shares=shares, all_shares=shares)

    def part(self, batch: Batch | PlacedBatch, tower: int) -> tuple[Batch, tf.Tensor]:
        """The part of tower `tower`, and its activity as `towers.input.tower_parts.part` returns it."""
        if isinstance(batch, PlacedBatch):
            return batch.parts[tower + self.begin], batch.activities[tower + self.begin]
        if self.stand_in is None:
            return self.part_of_some(batch, tower)
        is_empty = tf.equal(batch_length(batch), 0)
        filled = tf.cond(is_empty, lambda: tf.nest.map_structure(tf.constant, self.stand_in), lambda: batch)
        own, activity = self.part_of_some(filled, tower)
        return own, tf.where(is_empty, 0.0, activity)

    def part_of_microbatch(
        self, batch: Batch, tower: int, index: int | tf.Tensor, count: int
    ) -> tuple[Batch, tf.Tensor]:
        """As `part`, of microbatch `index` of `count`. The batch's first example stands in for an empty one."""
        given, has_some = part(batch, index, split.even_shares(count))
        own, activity = self.part(given, tower)
        return own, activity * has_some

    def part_of_some(self, batch: Batch, tower: int) -> tuple[Batch, tf.Tensor]:
        """As `part`, for a batch that is not empty, whose structure and dtypes may differ from the stand-in's."""
        return part(batch, tower + self.begin, self.shares)

    def pass_index(self, microbatch_index: int | tf.Tensor, tower: int) -> int | tf.Tensor:
        """Index of a tower's pass among all passes of a step; random seeds are derived from it."""
        return microbatch_index * len(self.all_shares) + self.first_tower + self.begin + tower


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PartsOfWorkers(TowerParts):
    """The parts of the towers of several workers, all computed by one process.

    A batch is cut for the workers first. Because of rounding, the parts differ from those of a single cut for all
    towers: of 10 examples for three workers with two equal towers each, the third tower gets two, not one.

    Attributes:
      shares_by_worker: relative sizes of the parts of each worker's towers.
    """

    shares_by_worker: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, shares_by_worker: Sequence[Sequence[float]]) -> "PartsOfWorkers":
        shares = tuple(share for of_worker in shares_by_worker for share in of_worker)
        return cls(shares=shares, all_shares=shares, shares_by_worker=tuple(map(tuple, shares_by_worker)))

    def part_of_some(self, batch, tower):
        towers = [
            (worker, own) for worker, shares in enumerate(self.shares_by_worker) for own in range(len(shares))
        ]
        worker, own = towers[tower + self.begin]
        given, has_some = part(batch, worker, [sum(shares) for shares in self.shares_by_worker])
        found, activity = part(given, own, self.shares_by_worker[worker])
        return found, activity * has_some
