"""Learning rate schedules: functions from step (from 0) to learning rate. Plain arithmetic on the host."""

import bisect
import dataclasses
import math
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

from towers.errors import UserError

Schedule = Callable[[int], float]

# The update takes the rate in float32.
_LARGEST = float(np.finfo(np.float32).max)
# A schedule that falls to 0 may end below it by rounding.
_ROUNDED_ZERO = -1e-12


def rate_at(schedule: Callable[[int], Any], step: int) -> float:
    """The learning rate of a step, from a schedule that may be a custom function.

    Args:
      schedule: a function from step to rate; it may also return an array or a tensor without dimensions.
      step: index of the step.

    Raises:
      UserError: the schedule returns anything but one finite number of at least 0.
    """
    value = schedule(step)
    try:
        rate = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    if not _ROUNDED_ZERO <= rate <= _LARGEST:
        name = getattr(schedule, "__qualname__", type(schedule).__name__)
        raise UserError(
            f"the learning rate schedule {name} returns {_written(value)} at step {step}: must be one finite "
            "number of at least 0; correct the schedule"
        )
    return max(rate, 0.0)


def _written(value: Any) -> str:
    """A value in one line, shortened; an array or a tensor with dimensions by its shape."""
    if not hasattr(value, "shape"):
        return reprlib.repr(value)
    shape = list(value.shape)
    return f"an array of shape {shape}" if shape else repr(np.asarray(value).item())


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same rate at every step."""

    rate: float

    def __post_init__(self):
        if not (self.rate >= 0 and math.isfinite(self.rate)):
            raise UserError(f"learning rate {self.rate}: it must be a finite number of at least 0")

    def __call__(self, step: int) -> float:
        return self.rate


@dataclasses.dataclass(frozen=True)
class Piecewise:
    """rates[i] from step boundaries[i - 1] on. There is one rate more than boundaries."""

    boundaries: tuple[int, ...]
    rates: tuple[float, ...]

    def __post_init__(self):
        if len(self.rates) != len(self.boundaries) + 1:
            raise UserError(
                f"piecewise schedule with {len(self.boundaries)} boundaries and {len(self.rates)} rates: "
                "give one rate more than boundaries"
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise UserError(f"piecewise boundaries {self.boundaries}: they must ascend, without repetition")

    def __call__(self, step: int) -> float:
        return self.rates[bisect.bisect_right(self.boundaries, step)]


@dataclasses.dataclass(frozen=True)
class Cosine:
    """From `peak` to `end` along half a cosine over `steps` (Loshchilov and Hutter 2017), then `end`."""

    peak: float
    steps: int
    end: float = 0.0

    def __post_init__(self):
        _check_steps(self.steps)

    def __call__(self, step: int) -> float:
        progress = min(step, self.steps) / self.steps
        return self.end + (self.peak - self.end) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclasses.dataclass(frozen=True)
class OneCycle:
    """Linear rise from peak / start_divisor, then a cosine down to peak / end_divisor (Smith and Topin 2018).

    Attributes:
      peak: the highest rate, at step rise * steps.
      steps: number of steps of the cycle; afterwards the rate stays at its end value.
      rise: fraction of the steps in which the rate rises, in (0, 1).
      start_divisor, end_divisor: first rate = peak / start_divisor, last rate = peak / end_divisor.
    """

    peak: float
    steps: int
    rise: float = 0.3
    start_divisor: float = 25.0
    end_divisor: float = 1e4

    def __post_init__(self):
        _check_steps(self.steps)
        _check_rise("one-cycle", self.rise)
        for name in ("start_divisor", "end_divisor"):
            if not getattr(self, name) > 0:
                raise UserError(
                    f"one-cycle {name}={getattr(self, name)}: the peak is divided by it; give more than 0"
                )

    def __call__(self, step: int) -> float:
        top = self.rise * self.steps
        if step < top:
            start = self.peak / self.start_divisor
            return start + (self.peak - start) * step / top
        end = self.peak / self.end_divisor
        progress = min((step - top) / (self.steps - top), 1.0)
        return end + (self.peak - end) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclasses.dataclass(frozen=True)
class Triangular:
    """Linear rise from start * peak to peak at step rise * steps, then linear fall to end * peak."""

    peak: float
    steps: int
    rise: float = 0.23
    start: float = 0.2
    end: float = 0.07

    def __post_init__(self):
        _check_steps(self.steps)
        _check_rise("triangular", self.rise)

    def __call__(self, step: int) -> float:
        progress = min(step / self.steps, 1.0)
        if progress < self.rise:
            return self.peak * (self.start + (1 - self.start) * progress / self.rise)
        return self.peak * (1 - (1 - self.end) * (progress - self.rise) / (1 - self.rise))


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Another schedule, multiplied by (step + 1) / steps in its first `steps` steps (Goyal et al. 2017)."""

    schedule: Schedule
    steps: int

    def __post_init__(self):
        if self.steps < 0:
            raise UserError(f"warm-up of {self.steps} steps: give 0 or more")

    def __call__(self, step: int) -> float:
        return rate_at(self.schedule, step) * min(1.0, (step + 1) / max(self.steps, 1))


def _check_steps(steps):
    if steps < 1:
        raise UserError(f"schedule over {steps} steps: it needs at least 1; set the number of steps or epochs")


def _check_rise(name, rise):
    if not 0 < rise < 1:
        raise UserError(f"{name} rise={rise}: the fraction of rising steps must be between 0 and 1")
