"""Update rules around another rule: rates that differ by parameter, and weights that are averaged on the way."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from towers.errors import UserError
from towers.updates.rules import UpdateRule


def norm_biases(path: str, shape: tf.TensorShape) -> bool:
    """The offsets of batch norms and their like, as Keras names them."""
    return path.rpartition("/")[2] == "beta"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledRates:
    """Another rule, at `factor` times the rate for the parameters that `scales` is true of.

    Their weight decay is that of the plain rate: it says how fast weights shrink.

    Attributes:
      rule: applied.
      factor: of the rate.
      scales: from canonical name and shape.
    """

    rule: UpdateRule
    factor: float
    scales: Callable[[str, tf.TensorShape], bool] = norm_biases
    elementwise = False

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

    def with_decay_divided(self, factor):
        return dataclasses.replace(self, rule=self.rule.with_decay_divided(factor))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookahead:
    """Another rule, drawn back to a running average of its own weights (Zhang et al. 2019, "Lookahead").

    Every `every` updates: slow = decay * slow + (1 - decay) * w, then w = slow. The decay grows with the cube of
    the progress (Jordan 2024, "airbench"), so that only the last part of a run is averaged; after the last update
    w is the average of those before it.

    Attributes:
      rule: applied.
      num_updates: of the whole run.
      every: updates from one drawing back to the next.
      last_decay: what the decay grows to.
    """

    rule: UpdateRule
    num_updates: int
    every: int = 5
    last_decay: float = 0.95**5
    elementwise = False

    def __post_init__(self):
        if self.num_updates < 1 or self.every < 1:
            raise UserError(f"lookahead every {self.every} of {self.num_updates} updates: both are at least 1")
        if not 0 <= self.last_decay < 1:
            raise UserError(f"lookahead decay {self.last_decay}: it lies in [0, 1)")

    @property
    def slot_names(self) -> tuple[str, ...]:
        return (*self.rule.slot_names, "slow")

    def apply(self, path, variable, slots, gradient, rate, update):
        own = {name: slots[name] for name in self.rule.slot_names}
        self.rule.apply(path, variable, own, gradient, rate, update)
        done = update + 1
        is_due = tf.logical_or(done % self.every == 0, done == self.num_updates)
        tf.cond(is_due, lambda: self._draw_back(variable, slots["slow"], done), lambda: False)

    def with_decay_divided(self, factor):
        return dataclasses.replace(self, rule=self.rule.with_decay_divided(factor))

    def _draw_back(self, variable, slow, done):
        progress = tf.cast(done, tf.float64) / self.num_updates
        decay = tf.cast(self.last_decay * progress**3, variable.dtype)
        # The slots begin at zero: the first time there is nothing to average with.
        decay = tf.where(done <= self.every, tf.zeros_like(decay), decay)
        is_last = done == self.num_updates
        mean = tf.where(is_last & (done > self.every), slow, decay * slow + (1 - decay) * variable)
        variable.assign(slow.assign(mean))
        return True
