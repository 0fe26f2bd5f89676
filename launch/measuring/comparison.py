"""Compares two benchmarks: which figures differ by more than the noise, and which became worse."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from launch.measuring.case import NO_LINK, Work
from launch.measuring.imitated_cpu import NO_ISA
from launch.measuring.results import FIRST_STEP, MEMORY, RATE, figure
from launch.measuring.student_t import noise_of_means

# Without a real change, one difference in twenty exceeds the noise.
_CONFIDENCE = 0.95
# Smaller relative differences are ignored, even if they exceed the noise.
_SMALLEST = 0.001
_ROUNDS_NEEDED = 2
# 1: more is better; -1: less is better.
_COMPARED = {RATE: +1, FIRST_STEP: -1, MEMORY: -1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A figure that differs between two benchmarks.

    Attributes:
      case: the row's name.
      figure: the figure's name.
      before, after: means of the rounds.
      noise: largest difference that is likely by chance.
      gain: relative improvement; below 0 the figure became worse.
    """

    case: str
    figure: str
    before: float
    after: float
    noise: float
    gain: float

    def __str__(self) -> str:
        word = "better" if self.gain > 0 else "worse"
        change = f"{self.before:.4g} -> {self.after:.4g}, {abs(self.gain):.1%} {word}"
        return f"{self.case}: {self.figure} {change} (noise ±{self.noise:.3g})"


def changes(before: Mapping, after: Mapping) -> list[Change]:
    """The figures that differ by more than the noise, in the order of the rows."""
    found = []
    for earlier, later in _pairs(before, after):
        if not _why_not(earlier, later):
            for name in _COMPARED:
                was, now = _values(earlier, name), _values(later, name)
                found += _change(later["name"], name, was, now) if was and now else []
    return found


def not_compared(before: Mapping, after: Mapping) -> list[str]:
    """A line of text for each row of both benchmarks that `changes` does not compare, with the reason."""
    reasons = {later["name"]: _why_not(earlier, later) for earlier, later in _pairs(before, after)}
    return [f"{name}: not compared, {reason}" for name, reason in reasons.items() if reason]


def _why_not(earlier: Mapping, later: Mapping) -> str:
    """The reason why two rows can't be compared; '' if they can."""
    differing = _differing_work(earlier, later)
    if differing:
        return f"other work: {', '.join(differing)}"
    if min(len(earlier["rounds"]), len(later["rounds"])) < _ROUNDS_NEEDED:
        return f"the noise of a single round is unknown: measure --rounds={_ROUNDS_NEEDED} or more, both times"
    return ""


def _pairs(before: Mapping, after: Mapping) -> list[tuple[Mapping, Mapping]]:
    """The rows of both benchmarks that have the same name."""
    # Files of versions without links and imitated CPUs lack these entries.
    earlier = {one["name"]: {"link": NO_LINK, "isa": NO_ISA, **one} for one in before["cases"]}
    return [(earlier[one["name"]], one) for one in after["cases"] if one["name"] in earlier]


def _differing_work(earlier: Mapping, later: Mapping) -> list[str]:
    """What differs in the work of two rows: 'link none -> 1gbit'. Files of older versions don't hold all of it."""
    return [
        f"{part.name} {earlier[part.name]} -> {later[part.name]}"
        for part in dataclasses.fields(Work)
        if part.name in earlier and part.name in later and earlier[part.name] != later[part.name]
    ]


def _values(one: Mapping, name: str) -> list[float]:
    """A figure's values in all rounds of a row; none if a round did not measure it."""
    return [each[name] for each in one["rounds"]] if name in one["figures"] else []


def _change(case: str, name: str, was: Sequence[float], now: Sequence[float]) -> list[Change]:
    before, after = statistics.fmean(was), statistics.fmean(now)
    errors = tuple(figure(values)["standard_error"] for values in (was, now))
    noise = noise_of_means(errors, (len(was), len(now)), _CONFIDENCE)
    if abs(after - before) <= max(noise, _SMALLEST * before):
        return []
    gain = _COMPARED[name] * (after - before) / before
    return [Change(case=case, figure=name, before=before, after=after, noise=noise, gain=gain)]


def only_in_one(before: Mapping, after: Mapping) -> list[str]:
    """A line of text for each row that only one of the benchmarks contains."""
    names = [{one["name"] for one in found["cases"]} for found in (before, after)]
    return [f"{name}: only in the first" for name in sorted(names[0] - names[1])] + [
        f"{name}: only in the second" for name in sorted(names[1] - names[0])
    ]
