"""Translates Keras optimizers into an update rule, a schedule and clipping, or refuses them by name.

The Keras optimizer itself is not used: its update consists of several operations without a lock, so simultaneous
pushes of two workers would lose steps.
"""

import math
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.devices import HOST
from towers.errors import UserError, check_kind
from towers.updates.clipping import Clipping
from towers.updates.keras_schedules import plain_rate
from towers.updates.rules import SGD, Adam, Momentum, UpdateRule
from towers.updates.schedules import Constant, Schedule, rate_at


class OptimizerParts(NamedTuple):
    """The translation of a Keras optimizer."""

    rule: UpdateRule
    schedule: Schedule
    clipping: Clipping


class KerasSchedule:
    """A Keras LearningRateSchedule as a function from step to learning rate."""

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule):
        self._schedule = schedule
        self._rate = plain_rate(schedule)
        # Messages about rates name a schedule by this.
        self.__qualname__ = type(schedule).__qualname__

    def __call__(self, step: int) -> float:
        if self._rate is not None:
            try:
                return self._rate(step)
            except (ZeroDivisionError, OverflowError):
                return math.inf  # as in Keras, which computes with tensors
        # A custom class. A GPU would compute its number only after the steps before it.
        with tf.device(HOST):
            return rate_at(self._schedule, step)

    def get_config(self) -> dict:
        """The configuration of the Keras schedule, which also describes this function."""
        return {"schedule": type(self._schedule).__name__, **self._schedule.get_config()}


def translate(optimizer: keras.optimizers.Optimizer) -> OptimizerParts:
    """The rule, schedule and clipping that compute the same as a new Keras optimizer.

    Raises:
      UserError: it is no optimizer, its class is not SGD, Adam or AdamW, an option has no translation, or the
        optimizer has already taken steps.
    """
    fix = "pass for example keras.optimizers.Adam(0.001)"
    check_kind("the optimizer", optimizer, keras.optimizers.Optimizer, fix)
    makers = {keras.optimizers.SGD: _sgd, keras.optimizers.Adam: _adam, keras.optimizers.AdamW: _adam}
    kind = type(optimizer)
    if kind not in makers:
        names = ", ".join(maker.__name__ for maker in makers)
        raise UserError(f"Keras optimizer {kind.__name__} is not supported: use one of {names}")
    _refuse_options(optimizer)
    return OptimizerParts(makers[kind](optimizer), _schedule(optimizer), _clipping(optimizer))


def _refuse_options(optimizer):
    name = type(optimizer).__name__
    refused = {
        "use_ema": "omit it",
        "loss_scale_factor": "use precision='float16', which scales the loss itself",
        "gradient_accumulation_steps": "use accumulation=... of StepOptions",
        "amsgrad": "omit it",
    }
    for option, fix in refused.items():
        if getattr(optimizer, option, None):
            raise UserError(f"{name}({option}={getattr(optimizer, option)}) is not supported: {fix}")
    if int(optimizer.iterations) > 0:
        raise UserError(
            f"{name} has already taken {int(optimizer.iterations)} steps, and its slots cannot be copied: "
            "pass a new optimizer"
        )


def _decay(optimizer) -> dict:
    if not optimizer.weight_decay:
        return {}
    return {"weight_decay": float(optimizer.weight_decay), "decays": _KerasDecay(optimizer)}


class _KerasDecay:
    """Selects the parameters that a Keras optimizer decays: all except those excluded by name."""

    def __init__(self, optimizer):
        if getattr(optimizer, "_exclude_from_weight_decay", None):
            raise UserError(
                f"{type(optimizer).__name__}.exclude_from_weight_decay(var_list=...) is not supported: "
                "pass var_names instead"
            )
        # Keras misses these patterns for layers that a subclassed model builds in its call; here they match.
        self._excluded = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)

    def __call__(self, path, shape) -> bool:
        # Keras matches the name of the tf.Variable, which contains its layers' names: 'norm/gamma:0'.
        name = f"{path.partition('#')[0]}:0"
        return self._excluded is None or self._excluded.search(name) is None


def _sgd(optimizer) -> UpdateRule:
    if not optimizer.momentum:
        return SGD(**_decay(optimizer))
    return Momentum(momentum=float(optimizer.momentum), nesterov=bool(optimizer.nesterov), **_decay(optimizer))


def _adam(optimizer) -> UpdateRule:
    # Keras rounds its betas to float32, where 1 - 0.999 is 1.3e-5 off. So in float64 its own training
    # (`train_on_batch`) ends 7e-6 to 5e-4 from ours; with betas that float32 holds exactly both agree to 1e-12.
    betas = {"beta_1": float(optimizer.beta_1), "beta_2": float(optimizer.beta_2)}
    return Adam(**betas, epsilon=float(optimizer.epsilon), **_decay(optimizer))


def _schedule(optimizer) -> Schedule:
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return KerasSchedule(rate)
    if callable(rate) and not isinstance(rate, keras.Variable):
        raise UserError(
            f"{type(optimizer).__name__}(learning_rate=...) is a function, which is not supported: use a "
            "keras.optimizers.schedules.LearningRateSchedule, a function of the step"
        )
    return Constant(float(optimizer.learning_rate))


def _clipping(optimizer) -> Clipping:
    return Clipping(value=optimizer.clipvalue, norm=optimizer.clipnorm, global_norm=optimizer.global_clipnorm)
