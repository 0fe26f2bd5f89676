"""The parts of a training step that every synchronous mode shares, wherever its towers run.

batch -> microbatches -> parts -> towers -> sums -> mean, checked and clipped -> update
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from towers import gradients, split
from towers.batch_stats import COMBINATIONS
from towers.counters import Counters
from towers.errors import UserError
from towers.options import StepOptions
from towers.precision import loss_scaling_for
from towers.task import Batch, WeightedValue, batch_length
from towers.tower import EvaluationResult, TowerResult

# Batches come from the host: they are cut there and each part is sent where it is wanted.
HOST = "/device:CPU:0"


class StepOutcome(NamedTuple):
    """What a step reports, undivided.

    Attributes:
      loss_sum, weight, metric_sums: as of a tower, over the global batch.
      examples: int32 scalar, the batch's length.
      gradient_norm: of the mean gradient, before clipping.
      finite: whether loss and gradients were, and so whether the update was applied.
      inputs_finite: False when the step was not finite and neither were the batch's features.
    """

    loss_sum: tf.Tensor
    weight: tf.Tensor
    metric_sums: Mapping[str, WeightedValue]
    examples: tf.Tensor
    gradient_norm: tf.Tensor
    finite: tf.Tensor
    inputs_finite: tf.Tensor


class Mean(NamedTuple):
    """The mean gradients of a step, clipped, and what is known of them."""

    gradients: list[gradients.Gradient]
    norm: tf.Tensor
    loss_finite: tf.Tensor
    finite: tf.Tensor


def check_batch_size(batch_size: int, accumulation: int, shares: Sequence[float]) -> None:
    """Raises UserError when a tower would be without an example of a full batch's smallest microbatch."""
    smallest = min(split.sizes(batch_size, split.even_shares(accumulation)))
    if smallest == 0:
        raise UserError(
            f"accumulation={accumulation} for a batch of {batch_size}: a microbatch is at least one example; "
            f"use at most {batch_size}"
        )
    of_each = "towers" if accumulation == 1 else f"towers of each of {accumulation} microbatches"
    split.check_batch_feeds_all(smallest, shares, of_each)


def open_length(element_spec) -> Batch:
    """The spec of a dataset's batches with dimension 0 open, so that the last one fits the same graph."""
    return tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype), element_spec)


def microbatch(batch: Batch, place: int, count: int) -> Batch:
    """Microbatch `place` of `count`; together they are the batch, whatever its length."""
    if count == 1:
        return batch
    ends = split.boundaries_tensor(batch_length(batch), split.even_shares(count))
    return _cut(batch, ends[place], ends[place + 1])


def part(batch: Batch, place: int, shares: Sequence[float]) -> tuple[Batch, tf.Tensor]:
    """Tower `place`'s part of a batch, and 1.0, or 0.0 if there is nothing in the batch for this tower.

    An idle tower is given the first example, so that no kernel meets an empty tensor; its result counts 0.
    """
    if len(shares) == 1:
        return batch, tf.constant(1.0)
    ends = split.boundaries_tensor(batch_length(batch), shares)
    busy = ends[place + 1] > ends[place]
    begin = tf.where(busy, ends[place], 0)
    return _cut(batch, begin, tf.where(busy, ends[place + 1], 1)), tf.cast(busy, tf.float32)


def part_or_stand_in(batch: Batch, stand_in, place: int, shares: Sequence[float]) -> tuple[Batch, tf.Tensor]:
    """As `part` of a worker's own part, which may be empty: then towers are given `stand_in`.

    Args:
      stand_in: a batch of one example, as arrays.
    """
    empty = tf.equal(batch_length(batch), 0)
    filled = tf.cond(empty, lambda: tf.nest.map_structure(tf.constant, stand_in), lambda: batch)
    found, busy = part(filled, place, shares)
    return found, tf.where(empty, 0.0, busy)


def _cut(batch, begin, end):
    return tf.nest.map_structure(lambda tensor: tensor[begin:end], batch)


def tower_seed(seed: int, step: tf.Tensor, place: tf.Tensor | int) -> tf.Tensor:
    """int32 [2], different for every step and every tower (and microbatch) within it."""
    of_step = tf.random.experimental.stateless_fold_in(tf.constant([seed, 0], tf.int32), tf.cast(step, tf.int32))
    return tf.random.experimental.stateless_fold_in(of_step, place)


def add_metrics(per_tower: Sequence[Mapping[str, WeightedValue]]) -> dict[str, WeightedValue]:
    """Undivided metrics of several towers as those of all their examples."""
    return {
        name: WeightedValue(*(tf.add_n([of_one[name][field] for of_one in per_tower]) for field in (0, 1)))
        for name in per_tower[0]
    }


def add_evaluations(per_tower: Sequence[EvaluationResult]) -> EvaluationResult:
    """Undivided evaluations of several towers as that of all their examples."""
    return EvaluationResult(
        tf.add_n([of_one.loss_sum for of_one in per_tower]),
        tf.add_n([of_one.weight for of_one in per_tower]),
        add_metrics([of_one.metric_sums for of_one in per_tower]),
    )


def add_results(results: Sequence[TowerResult], sum_gradients) -> TowerResult:
    """The sums over several results; `new_state` is left to the caller, who knows how it combines."""
    return TowerResult(
        tf.add_n([result.loss_sum for result in results]),
        tf.add_n([result.weight for result in results]),
        sum_gradients([result.gradients for result in results]),
        [],
        add_metrics([result.metric_sums for result in results]),
    )


def combine_state(old: Sequence[tf.Tensor], results: Sequence[TowerResult], batch_stats: str) -> list[tf.Tensor]:
    """The state after the towers' passes, by the policy's name in COMBINATIONS."""
    weights = [result.weight for result in results]
    return COMBINATIONS[batch_stats](old, [result.new_state for result in results], weights)


def changes_of_state(
    old: Sequence[tf.Tensor], own: TowerResult, *, first: tf.Tensor | bool, batch_stats: str
) -> list[tf.Tensor]:
    """What each process or replica with state of its own sends to the others: summed, `changed_state` takes it.

    Args:
      old: the state before, the same everywhere.
      own: this one's result.
      first: whether it is the first tower's.
      batch_stats: the policy's name in COMBINATIONS.
    """
    whole = tf.cast(first, tf.float32)
    changes = [
        (after - before) * tf.cast(own.weight if by_weight else whole, before.dtype)
        for before, after, by_weight in zip(old, own.new_state, _averaged(old, batch_stats), strict=True)
    ]
    return [own.weight, *changes]


def changed_state(old: Sequence[tf.Tensor], summed: Sequence[tf.Tensor], batch_stats: str) -> list[tf.Tensor]:
    """As `combine_state`, given the sums of all `changes_of_state`."""
    weight, *changes = summed
    # Where there was no example at all, the first tower's state is that of a stand-in.
    present = tf.sign(weight)
    return [
        before + _divided(change, weight if by_weight else present)
        for before, change, by_weight in zip(old, changes, _averaged(old, batch_stats), strict=True)
    ]


def _divided(change: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """Nothing of an integer but by 1 or 0."""
    divisor = tf.cast(divisor, change.dtype)
    return tf.math.divide_no_nan(change, divisor) if change.dtype.is_floating else change * divisor


def _averaged(state: Sequence[tf.Tensor], batch_stats: str) -> list[bool]:
    """Which are averaged by weight; of the others the first tower's stands."""
    return [batch_stats == "average" and value.dtype.is_floating for value in state]


def mean_gradients(sums: TowerResult, options: StepOptions, counters: Counters) -> Mean:
    """The one division of a step, by weight and loss scale; then the check, then clipping."""
    divisor = sums.weight * counters.loss_scale.read_value()
    factor = tf.math.divide_no_nan(tf.ones_like(divisor), divisor)
    means = [gradients.merged(gradients.scale(gradient, factor)) for gradient in sums.gradients]
    norm = gradients.global_norm(means)
    loss_finite = tf.math.is_finite(sums.loss_sum)
    finite = tf.logical_and(loss_finite, tf.math.is_finite(norm))
    return Mean(options.clipping.apply(means, norm), tf.cast(norm, tf.float32), loss_finite, finite)


def outcome(examples: tf.Tensor, features, sums: TowerResult, mean: Mean) -> StepOutcome:
    """What a step reports; the features are looked at only when something was not finite."""
    inputs_finite = tf.cond(mean.finite, lambda: tf.constant(True), lambda: _all_finite(features))
    return StepOutcome(
        sums.loss_sum,
        sums.weight,
        sums.metric_sums,
        examples,
        mean.norm,
        mean.finite,
        inputs_finite,
    )


def _all_finite(features) -> tf.Tensor:
    floating = [tensor for tensor in tf.nest.flatten(features) if tensor.dtype.is_floating]
    found = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in floating]
    return tf.reduce_all(tf.stack(found)) if found else tf.constant(True)


def may_update(mean: Mean, counters: Counters) -> tf.Tensor:
    """Whether this step's update is applied: it is finite, and no earlier step has stopped the run."""
    return tf.logical_and(mean.finite, counters.bad_step.read_value() < 0)


def count_step(examples: tf.Tensor, mean: Mean, options: StepOptions, counters: Counters) -> None:
    """Advances the counters; to be called after the update."""
    scaling = loss_scaling_for(options.precision)
    counters.advance(examples, mean.finite, mean.loss_finite, scaling, options.on_nan == "stop")
