"""What each device did at which time: its operations, joined to intervals that do not overlap.

An action of a pipeline is one interval: from the moment when the device is free and all inputs have arrived, to
the end of its last operation. Other operations are joined where the pauses between them are short.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from towers.pipeline.action import Kind
from towers.timeline.activities import Activity, Work, activity_of
from towers.timeline.operations import Span, TracedOperation, TracedSteps

# The row of the process's own work.
HOST_ROW = "input"
# Suffix of the row of a device's exchange with other processes, during which the device computes.
_EXCHANGE_ROW = "exchange"
# Operations of the same kind with a shorter pause between them are drawn as one interval.
_PAUSE_SECONDS = 2e-4


@dataclasses.dataclass(frozen=True)
class Interval(Span):
    """What one row did in a stretch of time.

    Attributes:
      row: a device, its exchange ('CPU:0 exchange'), or HOST_ROW.
      step: number of the step.
      activity: what it did.
    """

    row: str
    step: int
    activity: Activity

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def intervals_of(traced: TracedSteps) -> list[Interval]:
    """The intervals of all rows in all traced steps, sorted by start. Intervals of a row do not overlap."""
    found = []
    for step, span in sorted(traced.steps.items()):
        found += [
            Interval(
                max(one.start_seconds, span.start_seconds), one.end_seconds, HOST_ROW, step, Activity(Work.INPUT)
            )
            for one in traced.reads
            if span.start_seconds <= one.start_seconds < span.end_seconds
        ]
        by_row: dict[str, list[TracedOperation]] = collections.defaultdict(list)
        for one in traced.operations:
            if span.start_seconds <= one.start_seconds < span.end_seconds:
                is_exchange = one.waits and activity_of(one.name).work is Work.EXCHANGE
                by_row[f"{one.device} {_EXCHANGE_ROW}" if is_exchange else one.device].append(one)
        for row, operations in by_row.items():
            found += _of_row(row, step, operations)
    return sorted(found, key=lambda one: (one.start_seconds, one.row))


def _of_row(row: str, step: int, operations: Sequence[TracedOperation]) -> list[Interval]:
    actions: dict[Activity, list[TracedOperation]] = collections.defaultdict(list)
    others = []
    for one in operations:
        activity = activity_of(one.name)
        if activity.action is None:
            others.append((one, activity))
        else:
            actions[activity].append(one)
    spans = [(activity, _span(of_one)) for activity, of_one in actions.items()]
    kept = _one_after_another(row, step, [*spans, *_empty_passes(spans)])
    rest = []
    for one, activity in others:
        rest += [Interval(*span, row, step, activity) for span in _outside(one, kept)]
    return kept + _joined(rest, kept)


def _span(operations: Sequence[TracedOperation]) -> tuple[float, float]:
    """(start, end) of an action. Operations that need only earlier passes of its device may run before it."""
    arrived = [one.arrival_seconds for one in operations if one.arrival_seconds is not None]
    start = max(arrived, default=min(one.start_seconds for one in operations))
    return start, max(start, max(one.end_seconds for one in operations))


def _empty_passes(spans: Iterable[tuple[Activity, tuple[float, float]]]) -> list:
    """Empty backward passes: in a split schedule stage 0 sends no gradient, so all of its pass is WEIGHTS."""
    found = dict(spans)
    empty = []
    for activity, (start, _) in found.items():
        if activity.work is Work.WEIGHTS:
            action = dataclasses.replace(activity.action, kind=Kind.BACKWARD)
            backward = dataclasses.replace(activity, work=Work.BACKWARD, action=action)
            if backward not in found:
                empty.append((backward, (start, start)))
    return empty


def _one_after_another(
    device: str, step: int, spans: Sequence[tuple[Activity, tuple[float, float]]]
) -> list[Interval]:
    """Intervals that end where the next starts: work that no other device waits for may overlap it."""
    spans = sorted(spans, key=lambda one: one[1])
    starts = [*[start for _, (start, _) in spans], float("inf")][1:]
    return [
        Interval(start, min(end, following), device, step, activity)
        for (activity, (start, end)), following in zip(spans, starts, strict=True)
    ]


def _outside(one: Span, kept: Iterable[Interval]) -> list[tuple[float, float]]:
    """The parts of a span that no interval covers; `kept` is in order of time."""
    found, begin = [], one.start_seconds
    for interval in kept:
        if interval.end_seconds <= begin:
            continue
        if interval.start_seconds >= one.end_seconds:
            break
        if interval.start_seconds > begin:
            found.append((begin, interval.start_seconds))
        begin = interval.end_seconds
    if begin < one.end_seconds:
        found.append((begin, one.end_seconds))
    return found


def _joined(rest: Sequence[Interval], kept: Sequence[Interval]) -> list[Interval]:
    """Joins neighbours of the same kind. Of two that overlap, the later one begins at the other's end."""
    borders = sorted(interval.start_seconds for interval in kept)
    found: list[Interval] = []
    for one in sorted(rest, key=lambda one: (one.start_seconds, one.end_seconds)):
        last = found[-1] if found else None
        if (
            last is None
            or one.start_seconds > last.end_seconds + _PAUSE_SECONDS
            or _lies_between(borders, last, one)
        ):
            found.append(one)
        elif one.activity == last.activity:
            found[-1] = dataclasses.replace(last, end_seconds=max(last.end_seconds, one.end_seconds))
        elif one.end_seconds > last.end_seconds:
            found.append(dataclasses.replace(one, start_seconds=max(one.start_seconds, last.end_seconds)))
    return found


def _lies_between(borders: Sequence[float], first: Span, second: Span) -> bool:
    return any(first.end_seconds <= border <= second.start_seconds for border in borders)


def busy_seconds(intervals: Iterable[Interval]) -> dict[str, float]:
    """Seconds of work of each row."""
    found: dict[str, float] = collections.defaultdict(float)
    for one in intervals:
        found[one.row] += one.seconds
    return dict(found)
