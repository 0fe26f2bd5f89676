r"""The passes of this process's towers over a (micro)batch, and their sums.

                 parameters, read once
               /          |          \
    part 0 -> tower   part 1 -> tower   part 2 -> tower      each on its device
               \          |          /
                         sums                                where the parameters live
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from towers import batch_stats, moving_averages, sums
from towers.devices import HOST, Devices
from towers.input.placed_batch import PlacedBatch
from towers.input.tower_parts import TowerParts
from towers.options import StepOptions
from towers.owners import CURRENT_DEVICE, Copies, Owners, at_tower
from towers.packed_copies import UNPACKED, PackedCopies
from towers.per_tower import for_each_tower, of_tower
from towers.task import Batch
from towers.timeline.activities import EXCHANGE_SCOPE, tower_scope
from towers.tower import EvaluationResult, TowerResult


class TowerPasses:
    """Calls each tower once. Owns no variable."""

    def __init__(
        self,
        towers: Sequence[Callable[..., TowerResult]],
        devices: Devices,
        parts: TowerParts,
        options: StepOptions,
        owners: Owners = CURRENT_DEVICE,
        microbatches: int | None = None,
        copies: PackedCopies = UNPACKED,
        homes: Sequence[str] | None = None,
        sum_all: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] = list,
        calls_of_batch: int = 1,
    ):
        """Args:
        towers: the training pass of each tower, called as a `TowerFunction` with the tower's first device current;
          or a single pass that computes all towers: each argument that differs between towers is then `PerTower`,
          and so are the results; the gradients may be sums over the towers instead.
        devices: devices of the towers; the sums are computed on `devices.parameters`.
        parts: how the towers divide a batch.
        options: options of the step.
        owners: where the gradients meet; the current device is then `devices.parameters`.
        microbatches: number of microbatches that a tower computes in one call, if it is a pipeline. It then gets
          tuples with the part, seed and gain of each microbatch. A batch may then be a tuple too, with this
          process's part of each microbatch.
        copies: sends parameters and state to towers with one device each, and their new state back.
        homes: the device of each parameter, or of each part of `Slices`, for `copies`; None to leave parameters
          as they are.
        sum_all: sums each of several tensors over the processes that divide a batch.
        calls_of_batch: number of calls for which a pipeline gets the same batch; each call computes the next
          `microbatches` of calls_of_batch * microbatches, cut as on one device with that many microbatches.
        """
        self._calls_of_batch = calls_of_batch
        self._sum_all = sum_all
        self._copies, self._homes = copies, homes
        self._towers, self._devices, self._parts, self._options = towers, devices, parts, options
        self._owners, self._microbatches = owners, microbatches

    def train(
        self,
        batch: Batch | tuple[Batch, ...],
        microbatch_index: int | tf.Tensor,
        parameters: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor | Copies],
        *,
        step: tf.Tensor,
        loss_scale: tf.Tensor,
    ) -> TowerResult:
        """The sums of all towers' training passes; `new_state` is their combined state.

        Args:
          batch: the (micro)batch of this process; a tuple as in `__init__`.
          microbatch_index: index of the microbatch in the step.
          parameters, state: a value for each variable, as `towers.parameters.placement.Placement.read` gives them.
          step: int64 scalar, for random seeds.
          loss_scale: float32 scalar, multiplies the loss before differentiation.
        """
        with tf.device(HOST):
            of_step = seed_of_step(self._options.seed, step)

        def given_to(tower: int, device: str) -> tuple:
            with tf.device(HOST):
                parts, seeds, activities = self._given(batch, microbatch_index, tower, of_step)
            with tf.device(device):
                # Not on the host, which would wait for the scale of the step before.
                return parts, seeds, tf.nest.map_structure(lambda activity: activity * loss_scale, activities)

        results = []
        for device, result in self._called(self._towers, parameters, state, given_to):
            with tf.device(device), tf.name_scope(EXCHANGE_SCOPE):
                results.append(result._replace(gradients=self._owners.cut(result.gradients)))
        with tf.device(self._devices.parameters), tf.name_scope(EXCHANGE_SCOPE):
            old = at_tower(state, 0)
            results = self._with_moving_averages(old, results)
            new_state = batch_stats.combined(
                old,
                self._new_states(results),
                [result.weight for result in results],
                self._options.batch_stats,
            )
            return sums.add_results(results, self._owners.keep, new_state=new_state)

    def _called(
        self,
        passes: Sequence[Callable],
        parameters: Sequence,
        state: Sequence[tf.Tensor | Copies],
        given_to: Callable[[int, str], tuple],
    ) -> Iterator[tuple[str, NamedTuple]]:
        """Calls each tower; yields (the tower's first device, its result).

        Args:
          passes: as `towers` in `__init__`.
          parameters, state: as for `train`.
          given_to: a function from a tower and its first device to its other arguments.
        """
        devices = self._devices.towers
        if len(passes) < len(devices):
            (all_towers,) = passes
            given = for_each_tower([given_to(tower, device) for tower, device in enumerate(devices)])
            found = all_towers(parameters, state, *given)
            for tower, device in enumerate(devices):
                yield device, type(found)(*(of_tower(field, tower) for field in found))
            return
        parameters, states = self._sent(parameters, state)
        for tower, device in enumerate(devices):
            given = given_to(tower, device)
            with tf.device(device), tf.name_scope(tower_scope(tower)):
                found = passes[tower](at_tower(parameters, tower), at_tower(states, tower), *given)
            yield device, found

    def _sent(self, parameters: Sequence, state: Sequence) -> tuple[Sequence, Sequence]:
        """Parameters and state, as `Copies` where they are sent to the towers in packs."""
        towers, home = self._devices.towers, self._devices.parameters
        if self._homes is not None:
            parameters = self._copies.for_towers(parameters, self._homes, towers)
        return parameters, self._copies.for_towers(state, [home] * len(state), towers)

    def _with_moving_averages(self, old, results: Sequence[TowerResult]) -> Sequence[TowerResult]:
        """The results, with moving statistics as if they were averaged over the towers after each microbatch."""
        if self._microbatches in (None, 1) or not results[0].microbatches.added:
            return results
        weights = tf.add_n([result.microbatches.weights for result in results])
        (totals,) = self._sum_all([weights])
        decays, by_weight = self._towers[0].decays, batch_stats.averages(self._options.batch_stats)

        def state_of(result: TowerResult) -> dict[int, tf.Tensor]:
            own = result.microbatches
            return moving_averages.after_all(old, result.new_state, own, totals, decays, by_weight=by_weight)

        return [result._replace(new_state=state_of(result)) for result in results]

    def _new_states(self, results: Sequence[TowerResult]) -> list[Mapping[int, tf.Tensor]]:
        """Each tower's new state, sent in packs to where the states are combined."""
        home, found = self._devices.parameters, []
        for device, result in zip(self._devices.towers, results, strict=True):
            values = list(result.new_state.values())
            moved = self._copies.moved(values, device, [home] * len(values))
            found.append(dict(zip(result.new_state, moved, strict=True)))
        return found

    def _given(self, batch, microbatch_index, tower: int, of_step) -> tuple:
        """(part, seed, activity) of a tower, or a tuple of each for its microbatches."""
        if self._microbatches is None:
            part, activity = self._parts.part(batch, tower)
            return part, self._seed(of_step, microbatch_index, tower), activity
        count, given = self._microbatches, []
        first = microbatch_index * count if self._calls_of_batch > 1 else 0
        for index in range(count):
            if isinstance(batch, Batch):
                of_batch = count * self._calls_of_batch
                part, activity = self._parts.part_of_microbatch(batch, tower, first + index, of_batch)
            else:
                # A ring's worker with one microbatch gets it without a tuple.
                given_here = batch if isinstance(batch, PlacedBatch) else batch[index]
                part, activity = self._parts.part(given_here, tower)
            seed = self._seed(of_step, microbatch_index * count + index, tower)
            given.append((part, seed, activity))
        return tuple(zip(*given, strict=True))

    def _seed(self, of_step, microbatch_index, tower: int) -> tf.Tensor:
        return seed_of_pass(of_step, self._parts.pass_index(microbatch_index, tower))

    def evaluate(
        self,
        evaluations: Sequence[Callable[..., EvaluationResult]],
        batch: Batch,
        parameters: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor | Copies],
    ) -> EvaluationResult:
        """The sums of all towers' evaluation passes over a batch that is not empty.

        Args:
          evaluations: the evaluation pass of each tower, called as an `EvaluationFunction`.
          batch, parameters, state: as for `train`.
        """

        def given_to(tower: int, device: str) -> tuple:
            with tf.device(HOST):
                return self._parts.part_of_some(batch, tower)

        results = [result for _, result in self._called(evaluations, parameters, state, given_to)]
        with tf.device(HOST):
            return sums.add_evaluations(results)


def seed_of_step(seed: int, step: tf.Tensor) -> tf.Tensor:
    """int32 scalar: a different seed for each step.

    Args:
      seed: seed of the run.
      step: integer scalar.
    """
    folded = tf.random.experimental.stateless_fold_in(tf.constant([seed, 0], tf.int32), tf.cast(step, tf.int32))
    return tf.random.stateless_uniform([], folded, minval=None, maxval=None, dtype=tf.int32)


def seed_of_pass(of_step: tf.Tensor, pass_index: tf.Tensor | int) -> tf.Tensor:
    """int32 [2], a different seed for each pass of a step: the step's seed with the index of the pass folded in.

    Args:
      of_step: as `seed_of_step` returns it.
      pass_index: as `TowerParts.pass_index` returns it.
    """
    return tf.stack([of_step, pass_index])
