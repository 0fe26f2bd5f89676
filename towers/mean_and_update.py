"""The end of a step, the same in every synchronous mode.

sums of all towers  ->  mean (the one division)  ->  check  ->  clip  ->  update  ->  count

The mean is taken in the gradients' own precision: a factor rounded to float32 made float64 runs of different modes
differ by 4e-7 after 20 steps.

After the run's last step the rule may change the parameters once more (`finish_run`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers import gradients
from towers.counters import Counters
from towers.devices import HOST
from towers.options import StepOptions
from towers.owners import CURRENT_DEVICE, Owners
from towers.parameters.permission import Permission
from towers.parameters.placement import CentralPlacement, Placement
from towers.precision import loss_scaling_for
from towers.task import WeightedValue
from towers.timeline.activities import UPDATE_SCOPE
from towers.tower import TowerResult


class StepOutcome(NamedTuple):
    """What a step reports. Sums over the global batch, not means.

    Attributes:
      loss_sum, weight, metric_sums: as in `towers.tower.TowerResult`.
      examples: int32 scalar, number of examples in the global batch.
      gradient_norm: float32 scalar, norm of the mean gradient before clipping.
      finite: whether loss and gradients were finite; the update is applied only then.
      inputs_finite: False if the step was not finite and the batch's features were not finite either.
    """

    loss_sum: tf.Tensor
    weight: tf.Tensor
    metric_sums: Mapping[str, WeightedValue]
    examples: tf.Tensor
    gradient_norm: tf.Tensor
    finite: tf.Tensor
    inputs_finite: tf.Tensor


class Mean(NamedTuple):
    """The mean gradients of a step.

    Attributes:
      gradients: clipped mean gradients, one for each part that an owner has.
      norm: float32 scalar, global norm before clipping.
      loss_finite: whether the loss is finite.
      finite: whether loss and gradients are finite.
    """

    gradients: list[gradients.Gradient]
    norm: tf.Tensor
    loss_finite: tf.Tensor
    finite: tf.Tensor


def mean_gradients(
    sums: TowerResult, options: StepOptions, loss_scale: tf.Tensor, owners: Owners = CURRENT_DEVICE
) -> Mean:
    """Divides the summed gradients by weight * loss scale, checks that they are finite, and clips them.

    Each gradient is divided in its own precision: a float32 factor would round float64 gradients.
    """
    divisor = sums.weight * loss_scale
    means = owners.each(lambda summed: gradients.merged(gradients.divided(summed, divisor)), sums.gradients)
    norm = owners.norm(owners.each(gradients.squared_norm, means))
    loss_finite = tf.math.is_finite(sums.loss_sum)
    finite = tf.logical_and(loss_finite, tf.math.is_finite(norm))
    return Mean(options.clipping.apply(means, norm, owners), tf.cast(norm, tf.float32), loss_finite, finite)


def _is_compiled(placement: Placement, sums: TowerResult) -> bool:
    """Whether XLA compiles the mean; only if all gradients are on one device."""
    dense = all(isinstance(gradient, tf.Tensor) for gradient in sums.gradients)
    return isinstance(placement, CentralPlacement) and placement.compiled and dense


def _compiled_mean(sums: TowerResult, options: StepOptions, loss_scale: tf.Tensor, owners: Owners) -> Mean:
    """`mean_gradients` compiled by XLA as one function: on a GPU each separate operation waits for the host."""

    @tf.function(jit_compile=True, autograph=False)
    def compiled(summed, loss_sum, weight, loss_scale):
        given = sums._replace(gradients=summed, loss_sum=loss_sum, weight=weight)
        return mean_gradients(given, options, loss_scale)

    return compiled(list(sums.gradients), sums.loss_sum, sums.weight, loss_scale)


def finish_step(
    sums: TowerResult, rate: tf.Tensor, *, examples: tf.Tensor, options: StepOptions, counters: Counters, **named
) -> StepOutcome:
    """Updates parameters and state from the sums of all towers, and counts the step; then `finish_run`.

    Arguments as for `updated`.
    """
    result, mean = updated(sums, rate, examples=examples, options=options, counters=counters, **named)
    count_step(examples, mean, options, counters)
    finish_run(named["placement"], options, counters, masked=named["masked"])
    return result


def updated(
    sums: TowerResult,
    rate: tf.Tensor,
    *,
    examples: tf.Tensor,
    features: Sequence[tuple[str, Any]],
    placement: Placement,
    device: str,
    options: StepOptions,
    counters: Counters,
    masked: bool,
) -> tuple[StepOutcome, Mean]:
    """Updates parameters and state from the sums of all towers. Call `count_step` after it, with the mean.

    Args:
      sums: sums over all towers of all processes.
      rate: float32 scalar, learning rate.
      examples: int32 scalar, number of examples in the global batch.
      features: the batch's features in parts, each a pair (device that has it, any structure of tensors); without
        `masked` they are read only if the step is not finite.
      placement: where the parameters are and how they are updated.
      device: device that computes the mean.
      options: options of the step.
      counters: counters of the run; they are only read.
      masked: whether masks skip an update, as in `Permission`, so that no operation waits for `finite`.

    Returns:
      What the step reports, and the mean without its gradients.
    """
    with tf.device(device), tf.name_scope(UPDATE_SCOPE):
        means = _compiled_mean if _is_compiled(placement, sums) else mean_gradients
        mean = means(sums, options, counters.loss_scale.read_value(), placement.owners)
    with tf.device(counters.device):
        is_allowed = Permission(may_update(mean, counters), masked)
        update = counters.updates.read_value()
    with tf.name_scope(UPDATE_SCOPE):
        placement.update(is_allowed, mean.gradients, sums.new_state, rule=options.rule, rate=rate, update=update)
    if masked:  # nothing is sent to the host, which would wait for it
        with tf.device(counters.device):
            inputs_finite = tf.logical_or(mean.finite, _all_finite(features))
    else:
        with tf.device(HOST):
            inputs_finite = _all_finite_unless(mean.finite, features)
    return _outcome(examples, inputs_finite, sums, mean), mean._replace(gradients=[])


def _outcome(examples: tf.Tensor, inputs_finite: tf.Tensor, sums: TowerResult, mean: Mean) -> StepOutcome:
    return StepOutcome(
        sums.loss_sum,
        sums.weight,
        sums.metric_sums,
        examples,
        mean.norm,
        mean.finite,
        inputs_finite,
    )


def _all_finite_unless(finite: tf.Tensor, features) -> tf.Tensor:
    """True if the step is finite; otherwise whether the features are finite. Only then they are read."""
    return tf.cond(finite, lambda: tf.constant(True), lambda: _all_finite(features))


def _all_finite(features: Sequence[tuple[str, Any]]) -> tf.Tensor:
    """Whether all floating features are finite. Each device sends only a bool."""
    found = []
    for device, part in features:
        with tf.device(device):
            floating = [tensor for tensor in tf.nest.flatten(part) if tensor.dtype.is_floating]
            found += [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in floating]
    return tf.reduce_all(tf.stack(found)) if found else tf.constant(True)


def may_update(mean: Mean, counters: Counters) -> tf.Tensor:
    """Whether this step's update is applied: the step is finite and no earlier step has stopped the run."""
    return tf.logical_and(mean.finite, counters.bad_step.read_value() < 0)


def count_step(examples: tf.Tensor, mean: Mean, options: StepOptions, counters: Counters) -> None:
    """Advances the counters. Call it after the update."""
    scaling = loss_scaling_for(options.precision)
    with tf.device(counters.device):
        counters.advance(examples, mean.finite, mean.loss_finite, scaling, options.on_nan == "stop")


def finish_run(placement: Placement, options: StepOptions, counters: Counters, *, masked: bool) -> None:
    """Runs the rule's `finish` after the run's last step. Call it after `count_step`."""
    if options.rule.num_steps is None:
        return
    with tf.device(counters.device):
        is_last = tf.equal(counters.step.read_value(), options.rule.num_steps)
        is_last = tf.logical_and(is_last, counters.bad_step.read_value() < 0)
        updates = counters.updates.read_value()
    placement.finish(Permission(is_last, masked), rule=options.rule, updates=updates)
