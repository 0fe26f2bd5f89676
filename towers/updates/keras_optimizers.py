"""Keras optimizers at the door: translated into an update rule, a schedule and clipping, or refused by name.

A Keras optimizer is not used as it is because its update is several operations without a lock: two workers
that push at once lose steps.
"""

from typing import NamedTuple

import keras

from towers.errors import UserError
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD, Adam, Momentum, UpdateRule
from towers.updates.schedules import Constant, Schedule


class OptimizerParts(NamedTuple):
    """What a Keras optimizer stands for."""

    rule: UpdateRule
    schedule: Schedule
    clipping: Clipping


class KerasSchedule:
    """A Keras LearningRateSchedule as a number for every step."""

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule):
        self._schedule = schedule

    def __call__(self, step: int) -> float:
        return float(self._schedule(step))


def translate(optimizer: keras.optimizers.Optimizer) -> OptimizerParts:
    """The parts that do what a fresh Keras optimizer does.

    Raises:
      UserError: another class than SGD, Adam or AdamW, an option that has no translation, or an optimizer
        that has already taken steps.
    """
    makers = {keras.optimizers.SGD: _sgd, keras.optimizers.Adam: _adam, keras.optimizers.AdamW: _adam}
    kind = type(optimizer)
    if kind not in makers:
        names = ", ".join(maker.__name__ for maker in makers)
        raise UserError(f"Keras optimizer {kind.__name__} has no translation: use one of {names}")
    _refuse_options(optimizer)
    return OptimizerParts(makers[kind](optimizer), _schedule(optimizer), _clipping(optimizer))


def _refuse_options(optimizer):
    name = type(optimizer).__name__
    refused = {
        "use_ema": "leave it out",
        "loss_scale_factor": "use precision=float16, which scales the loss by itself",
        "gradient_accumulation_steps": "use the strategy's accumulation",
        "amsgrad": "leave it out",
    }
    for option, fix in refused.items():
        if getattr(optimizer, option, None):
            raise UserError(f"{name}({option}={getattr(optimizer, option)}) has no translation: {fix}")
    if int(optimizer.iterations) > 0:
        raise UserError(
            f"{name} has already taken {int(optimizer.iterations)} steps, whose slots can't be taken over: "
            "give a new one"
        )


def _decay(optimizer) -> dict:
    if not optimizer.weight_decay:
        return {}
    return {"weight_decay": float(optimizer.weight_decay), "decays": _KerasDecay(optimizer)}


class _KerasDecay:
    """The parameters that a Keras optimizer decays: all but those it was told to leave out."""

    def __init__(self, optimizer):
        if getattr(optimizer, "_exclude_from_weight_decay", None):
            raise UserError(
                f"{type(optimizer).__name__}.exclude_from_weight_decay(var_list=...) has no translation: "
                "give var_names instead"
            )
        self._left_out = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)

    def __call__(self, path, shape) -> bool:
        # As Keras: the pattern is sought in the variable's own name, not in its layer's.
        name = path.rpartition("/")[2].partition("#")[0]
        return self._left_out is None or self._left_out.search(name) is None


def _sgd(optimizer) -> UpdateRule:
    if not optimizer.momentum:
        return SGD(**_decay(optimizer))
    return Momentum(momentum=float(optimizer.momentum), nesterov=bool(optimizer.nesterov), **_decay(optimizer))


def _adam(optimizer) -> UpdateRule:
    betas = {"beta_1": float(optimizer.beta_1), "beta_2": float(optimizer.beta_2)}
    return Adam(**betas, epsilon=float(optimizer.epsilon), **_decay(optimizer))


def _schedule(optimizer) -> Schedule:
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return KerasSchedule(rate)
    return Constant(float(optimizer.learning_rate))


def _clipping(optimizer) -> Clipping:
    return Clipping(value=optimizer.clipvalue, norm=optimizer.clipnorm, global_norm=optimizer.global_clipnorm)
