"""Intervals as a Chrome trace: JSON that chrome://tracing and ui.perfetto.dev load.

The format is "Trace Event Format" (Google): complete events ("X") with a thread for each row, metadata ("M") that
names the rows, and flow events ("s", "f") for what is sent from one row to another. Times are in microseconds.
"""

from collections.abc import Mapping, Sequence

from towers.timeline.activities import activity_of
from towers.timeline.intervals import Interval
from towers.timeline.operations import Span, Transfer

_PROCESS, _STEPS = 0, 0


def chrome_trace(
    steps: Mapping[int, Span], rows: Sequence[str], intervals: Sequence[Interval], transfers: Sequence[Transfer]
) -> dict:
    """The trace as a JSON object.

    Args:
      steps: the time span of each step.
      rows: names of the rows, from above.
      intervals: what the rows did.
      transfers: transfers between actions of pipelines become arrows.
    """
    begin = min(span.start_seconds for span in steps.values())
    threads = {row: index for index, row in enumerate(rows, start=_STEPS + 1)}
    named = {"steps": _STEPS, **threads}
    events = [_metadata("thread_name", thread, {"name": row}) for row, thread in named.items()]
    events += [_metadata("thread_sort_index", thread, {"sort_index": thread}) for thread in named.values()]
    events += [_complete(f"step {step}", "step", span, begin, _STEPS) for step, span in sorted(steps.items())]
    events += [
        _complete(label(one), one.activity.work.value, one, begin, threads[one.row], step=one.step)
        for one in intervals
    ]
    shown = [one for one in between_actions(transfers) if one.source in threads and one.target in threads]
    for index, one in enumerate(shown):
        common = {"cat": "transfer", "name": "transfer", "pid": _PROCESS, "id": index}
        ends = (("s", one.source, one.start_seconds), ("f", one.target, one.end_seconds))
        for phase, row, seconds in ends:
            events.append({**common, "ph": phase, "bp": "e", "tid": threads[row], "ts": 1e6 * (seconds - begin)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def between_actions(transfers: Sequence[Transfer]) -> list[Transfer]:
    """The transfers of tensors that a pipeline's action computed."""
    return [one for one in transfers if activity_of(one.name).action is not None]


def label(interval: Interval) -> str:
    """A name for an interval; an action's is like '1B3', the backward pass of microbatch 3 through stage 1."""
    action = interval.activity.action
    return interval.activity.work.value if action is None else str(action)


def _metadata(name: str, thread: int, arguments: Mapping) -> dict:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": thread, "args": arguments}


def _complete(name: str, category: str, span: Span, begin: float, thread: int, **arguments) -> dict:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": _PROCESS,
        "tid": thread,
        "ts": 1e6 * (span.start_seconds - begin),
        "dur": 1e6 * (span.end_seconds - span.start_seconds),
        "args": arguments,
    }
