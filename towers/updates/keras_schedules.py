"""Keras's learning rate schedules as plain arithmetic on the host: no operation of TensorFlow runs for them."""

import bisect
import math
from collections.abc import Callable

from keras.optimizers import schedules

Rate = Callable[[int], float]


def plain_rate(schedule: schedules.LearningRateSchedule) -> Rate | None:
    """A function from step to learning rate, in float64 (Keras: float32); None for an unknown class."""
    makers = {
        schedules.ExponentialDecay: _exponential,
        schedules.PiecewiseConstantDecay: _piecewise,
        schedules.PolynomialDecay: _polynomial,
        schedules.InverseTimeDecay: _inverse_time,
        schedules.CosineDecay: _cosine,
        schedules.CosineDecayRestarts: _cosine_restarts,
    }
    # Exact classes only: a subclass may compute something else.
    make = makers.get(type(schedule))
    return None if make is None else make(**_numbers(schedule.get_config()))


def _numbers(config: dict) -> dict:
    return {name: value for name, value in config.items() if name != "name"}


def _exponential(*, initial_learning_rate, decay_steps, decay_rate, staircase) -> Rate:
    def rate(step):
        return initial_learning_rate * decay_rate ** _periods(step, decay_steps, staircase)

    return rate


def _inverse_time(*, initial_learning_rate, decay_steps, decay_rate, staircase) -> Rate:
    def rate(step):
        return initial_learning_rate / (1 + decay_rate * _periods(step, decay_steps, staircase))

    return rate


def _periods(step: int, length: float, whole: bool) -> float:
    return step // length if whole else step / length


def _piecewise(*, boundaries, values) -> Rate:
    # The step at a boundary still has the rate before it.
    return lambda step: float(values[bisect.bisect_left(boundaries, step)])


def _polynomial(*, initial_learning_rate, decay_steps, end_learning_rate, power, cycle) -> Rate:
    def rate(step):
        if cycle:
            length = decay_steps * max(1, math.ceil(step / decay_steps))
        else:
            length, step = decay_steps, min(step, decay_steps)
        return (initial_learning_rate - end_learning_rate) * (1 - step / length) ** power + end_learning_rate

    return rate


def _cosine(*, initial_learning_rate, decay_steps, alpha, warmup_target, warmup_steps) -> Rate:
    def rate(step):
        if warmup_target is None:
            return initial_learning_rate * _half_cosine(min(step, decay_steps) / decay_steps, alpha)
        if step < warmup_steps:
            return initial_learning_rate + (warmup_target - initial_learning_rate) * step / warmup_steps
        step = min(step, warmup_steps + decay_steps)
        return warmup_target * _half_cosine((step - warmup_steps) / decay_steps, alpha)

    return rate


def _cosine_restarts(*, initial_learning_rate, first_decay_steps, t_mul, m_mul, alpha) -> Rate | None:
    if t_mul < 1:
        return None

    def rate(step):
        # Counts restarts, because the logarithm in Keras's formula rounds: a restart could come a step late.
        restarts, length = 0, first_decay_steps
        if t_mul == 1:
            restarts, step = divmod(step, length)
        while step >= length:
            restarts, step, length = restarts + 1, step - length, length * t_mul
        return initial_learning_rate * _half_cosine(step / length, alpha, m_mul**restarts)

    return rate


def _half_cosine(progress: float, alpha: float, height: float = 1.0) -> float:
    """(1 - alpha) * cosine + alpha, where the cosine falls from `height` at progress 0 to 0 at progress 1."""
    return (1 - alpha) * height * 0.5 * (1 + math.cos(math.pi * progress)) + alpha
