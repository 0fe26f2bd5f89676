"""Update rules around another rule: learning rates by parameter, and averages of the weights.

Being rules, averages work in all strategies that give a rule whole parameters, and checkpoints hold the slow
weights as slots. Rates by parameter need only a parameter's name and number of dimensions, which its slices share.
The last average is taken after the step is counted, because the last step may be skipped.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import tensorflow as tf

from towers.devices import is_gpu
from towers.errors import UserError
from towers.updates.rules import UpdateRule


def norm_biases(path: str, shape: tf.TensorShape) -> bool:
    """Selects the offsets (`beta`) of Keras's normalisation layers."""
    return path.rpartition("/")[2] == "beta"


class ComposedRule:
    """A rule around another one.

    Attributes:
      rule: the rule that is applied.
      option: the training option that selects the composed rule, for messages.
      needs_whole: whether it needs whole parameters, whatever `rule` needs.
    """

    rule: UpdateRule
    option: ClassVar[str]
    needs_whole: ClassVar[bool]

    @property
    def elementwise(self) -> bool:
        return not self.needs_whole and self.rule.elementwise


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledRates(ComposedRule):
    """Another rule, at `factor` times the learning rate for the parameters that `scales` selects.

    The factor does not change the weight decay: w still shrinks by rate * weight_decay in each update.

    Attributes:
      rule: the rule that is applied.
      factor: multiplies the learning rate.
      scales: takes a parameter's canonical name and its shape (or that of a slice, with as many dimensions);
        returns whether the factor applies.
    """

    rule: UpdateRule
    factor: float
    scales: Callable[[str, tf.TensorShape], bool] = norm_biases
    option = "norm_bias_rate_factor"
    needs_whole = False

    def __post_init__(self):
        if not self.factor > 0:
            raise UserError(f"rate factor {self.factor}: give a number above 0")

    @property
    def slot_names(self) -> tuple[str, ...]:
        return self.rule.slot_names

    def apply(self, path, variable, slots, gradient, rate, update):
        if not self.scales(path, variable.shape):
            self.rule.apply(path, variable, slots, gradient, rate, update)
            return
        rule = self.rule.with_decay_divided(self.factor)
        rule.apply(path, variable, slots, gradient, rate * self.factor, update)

    def new_values(self, path, value, slots, gradient, rate, update):
        """As those of the rules in `towers.updates.rules`, of which `rule` must be one."""
        if not self.scales(path, value.shape):
            return self.rule.new_values(path, value, slots, gradient, rate, update)
        rule = self.rule.with_decay_divided(self.factor)
        return rule.new_values(path, value, slots, gradient, rate * self.factor, update)

    @property
    def num_steps(self) -> int | None:
        return self.rule.num_steps

    def finish(self, path, variable, slots, updates):
        self.rule.finish(path, variable, slots, updates)

    def with_decay_divided(self, factor):
        return dataclasses.replace(self, rule=self.rule.with_decay_divided(factor))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookahead(ComposedRule):
    """Another rule whose weights are reset to a running average of themselves (Zhang et al. 2019, "Lookahead").

    Every `every` updates: slow = decay * slow + (1 - decay) * w, then w = slow. The decay is last_decay *
    (progress of the run)^3 (Jordan 2024, "airbench"), so that mostly the last part of a run is averaged. After
    the last step, applied or skipped, w is the average of the earlier ones; at most 2 * every updates have no
    average, and w stays. In steps beyond the planned ones the decay stays last_decay. Moving statistics of batch
    norm are not averaged: with those of two batches (momentum 0.6) that costs 0.3 points of accuracy, with those
    of ten batches nothing.

    Attributes:
      rule: the rule that is applied.
      num_updates: number of steps of the whole run, which is its number of updates if none is skipped.
      every: number of updates from one reset to the next.
      last_decay: the decay at the end of the run.
    """

    rule: UpdateRule
    num_updates: int
    every: int = 5
    last_decay: float = 0.95**5
    option = "lookahead_every"
    needs_whole = True

    def __post_init__(self):
        if self.num_updates < 1 or self.every < 1:
            raise UserError(f"lookahead every {self.every} of {self.num_updates} updates: both must be at least 1")
        if not 0 <= self.last_decay < 1:
            raise UserError(f"lookahead decay {self.last_decay}: it must be in [0, 1)")

    @property
    def slot_names(self) -> tuple[str, ...]:
        return (*self.rule.slot_names, "slow")

    def apply(self, path, variable, slots, gradient, rate, update):
        own = {name: slots[name] for name in self.rule.slot_names}
        self.rule.apply(path, variable, own, gradient, rate, update)
        if is_gpu(variable.device):
            # Without a conditional, for which a GPU would wait for the host in every step.
            value, slow = self._reset_if_due(variable.read_value(), slots["slow"].read_value(), update)
            slots["slow"].assign(slow)
            variable.assign(value)
        else:
            reset = functools.partial(self._reset_to_average, variable, slots["slow"], update + 1)
            tf.cond(self._is_due(update), reset, lambda: False)

    def new_values(self, path, value, slots, gradient, rate, update):
        """As those of the rules in `towers.updates.rules`, of which `rule` must be one."""
        own = {name: slots[name] for name in self.rule.slot_names}
        value, found = self.rule.new_values(path, value, own, gradient, rate, update)
        value, slow = self._reset_if_due(value, slots["slow"], update)
        return value, {**found, "slow": slow}

    @property
    def num_steps(self) -> int:
        return self.num_updates

    def finish(self, path, variable, slots, updates):
        # The first reset only copies the weights. Until the second one there is no average, and the copy lacks all
        # later updates.
        variable.assign(tf.where(updates > 2 * self.every, slots["slow"], variable))

    def with_decay_divided(self, factor):
        return dataclasses.replace(self, rule=self.rule.with_decay_divided(factor))

    def _is_due(self, update) -> tf.Tensor:
        """Whether this update is followed by a reset."""
        done = update + 1
        # The last average excludes the weights after the last update; `finish` takes it.
        is_last = tf.logical_and(done == self.num_updates, done > self.every)
        return tf.logical_and(done % self.every == 0, tf.logical_not(is_last))

    def _reset_if_due(self, value, slow, update) -> tuple[tf.Tensor, tf.Tensor]:
        """The weights and slow weights after an update, without a conditional."""
        is_due, average = self._is_due(update), self._average(value, slow, update + 1)
        return tf.where(is_due, average, value), tf.where(is_due, average, slow)

    def _reset_to_average(self, variable, slow, done):
        variable.assign(slow.assign(self._average(variable, slow, done)))
        return True

    def _average(self, variable, slow, done):
        progress = tf.minimum(tf.cast(done, tf.float64) / self.num_updates, 1.0)
        decay = tf.cast(self.last_decay * progress**3, variable.dtype)
        # The slots start at zero: the first time there is nothing to average.
        decay = tf.where(done <= self.every, tf.zeros_like(decay), decay)
        return decay * slow + (1 - decay) * variable


def check_elementwise(rule: UpdateRule, where: str, instead: str, *, named: bool = True) -> None:
    """Raises UserError for a rule that needs whole parameters.

    Args:
      rule: a rule, perhaps composed around another one.
      where: why whole parameters are not available, for the message.
      instead: what the user can do if the rule is not a composed one.
      named: whether an update knows the name of the parameter that it updates. If not, every composed rule is
        refused.
    """
    refused, fixes = [], []
    while isinstance(rule, ComposedRule):
        if rule.needs_whole or not named:
            refused.append(type(rule).__name__)
            fixes.append(f"omit {rule.option}")
        rule = rule.rule
    if not rule.elementwise:
        refused.append(type(rule).__name__)
        fixes.append(instead)
    if refused:
        raise UserError(f"{' and '.join(refused)} with {where}; {' and '.join(fixes)}")
