"""Two benchmarks beside each other: what differs by more than the noise, and what has become worse."""

import dataclasses
import math
from collections.abc import Mapping

from launch.measuring.results import FIRST_STEP, MEMORY, RATE

# How many standard errors of the difference are noise: one in twenty exceeds them by chance.
_NOISE_ERRORS = 2.0
_COMPARED = {RATE: +1, FIRST_STEP: -1, MEMORY: -1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A figure that differs between two benchmarks.

    Attributes:
      case: the line's name.
      figure: what was measured.
      before, after: medians.
      noise: how far apart they may be by chance; None where a benchmark of one round does not tell.
      gain: relative; below 0 it has become worse, whichever way is better.
    """

    case: str
    figure: str
    before: float
    after: float
    noise: float | None
    gain: float

    def __str__(self) -> str:
        noise = "noise unknown, one round" if self.noise is None else f"noise ±{self.noise:.3g}"
        word = "better" if self.gain > 0 else "worse"
        change = f"{self.before:.4g} -> {self.after:.4g}, {abs(self.gain):.1%} {word}"
        return f"{self.case}: {self.figure} {change} ({noise})"


def changes(before: Mapping, after: Mapping) -> list[Change]:
    """What differs by more than the noise, in the order of the lines."""
    earlier = {one["name"]: one["figures"] for one in before["cases"]}
    found = []
    for one in after["cases"]:
        for figure, sign in _COMPARED.items():
            was, now = earlier.get(one["name"], {}).get(figure), one["figures"].get(figure)
            if was is not None and now is not None:
                found += _change(one["name"], figure, sign, was, now)
    return found


def _change(case: str, figure: str, sign: int, was: Mapping, now: Mapping) -> list[Change]:
    difference = now["median"] - was["median"]
    errors = [one["standard_error"] for one in (was, now)]
    noise = None if None in errors else _NOISE_ERRORS * math.hypot(*errors)
    if not difference or abs(difference) <= (noise or 0.0):
        return []
    gain = sign * difference / was["median"]
    return [Change(case=case, figure=figure, before=was["median"], after=now["median"], noise=noise, gain=gain)]


def only_in_one(before: Mapping, after: Mapping) -> list[str]:
    """Lines that can't be compared."""
    names = [{one["name"] for one in found["cases"]} for found in (before, after)]
    return [f"{name}: only in the first" for name in sorted(names[0] - names[1])] + [
        f"{name}: only in the second" for name in sorted(names[1] - names[0])
    ]
