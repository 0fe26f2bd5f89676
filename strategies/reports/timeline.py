"""A callback that traces a few steps and draws the timeline of each device."""

import contextlib
import importlib.util
import json
import os
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.eager import context  # the only way to collect the graphs that TensorFlow runs
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from strategies.atomic_write import write_atomically
from strategies.callbacks import Callback, Run, writing
from strategies.reports.chrome_trace import chrome_trace
from strategies.reports.timeline_picture import picture
from towers.errors import UserError
from towers.timeline.intervals import HOST_ROW, intervals_of
from towers.timeline.operations import STEP_EVENT, STEP_NUMBER, RunGraphs, TracedSteps, read_trace
from towers.timeline.pipeline_run import described, pipeline_runs

PICTURE, TRACE = "timeline.png", "timeline.json"
_MOST_STEPS, _MOST_PANELS = 20, 3
# At this level TensorFlow traces operations that take less than a microsecond too.
_ALL_OPERATIONS = 3


class TimelineOfSteps(Callback):
    """Draws the steps from `first` up to `last` into timeline.png and timeline.json in the run's directory.

    Traced steps run one at a time. Of several processes, the one that keeps the run's files draws its own work.
    """

    def __init__(self, first: int, last: int, *, say: Callable[[str], None] = print):
        """Args:
        first, last: the steps, the last one excluded.
        say: called with lines for the user after these steps.

        Raises:
          UserError: not 0 <= first < last, or too many steps.
        """
        self._named = f"timeline_steps={first}:{last}"
        if not 0 <= first < last <= first + _MOST_STEPS:
            raise UserError(
                f"{self._named}: give FIRST:LAST with 0 <= FIRST < LAST, at most {_MOST_STEPS} steps, as 10:13"
            )
        self._first, self._last, self._say = first, last, say
        self._graphs: RunGraphs | None = None
        self._ends = contextlib.ExitStack()
        self._folder: pathlib.Path | None = None
        self._is_collecting = False

    def check(self, run: Run) -> None:
        if run.directory is None:
            raise UserError(
                f"{self._named}: this run has no directory for the picture (a dry run writes no files); give a "
                "directory, or omit timeline_steps"
            )
        # The first step is excluded: it traces the graphs, and TensorFlow's preparation hides the devices' work.
        if not run.first_step < self._first < self._last <= run.last_step:
            raise UserError(
                f"{self._named}: this run has steps {run.first_step} to {run.last_step - 1}; give steps among "
                "them, after the first"
            )
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError(f"{self._named}: matplotlib is not installed: install it, or omit timeline_steps")
        for name in (PICTURE, TRACE):
            path = run.directory / name
            if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
                raise UserError(f"{path}: can't be written: move it away, or give another directory")

    def begin(self, run: Run) -> None:
        self._directory = run.directory
        context.enable_graph_collection()
        self._is_collecting = True

    def boundaries(self):
        return tuple(range(self._first, self._last + 1))

    def before_steps(self, step):
        if step == self._first:
            self._folder = pathlib.Path(self._ends.enter_context(tempfile.TemporaryDirectory()))
            start_tracing(self._folder)
        if self._folder is not None:
            self._step = tf.profiler.experimental.Trace(STEP_EVENT, **{STEP_NUMBER: step})
            self._step.__enter__()

    def steps(self, report):
        if self._is_collecting:
            self._graphs = RunGraphs(context.export_run_metadata())
            self._stop_collecting()
        if self._folder is not None:
            self._step.__exit__(None, None, None)
            if report.step >= self._last:
                self._draw()

    def end(self):
        """A run that ends before the last step draws nothing."""
        if self._folder is not None:
            tf.profiler.experimental.stop(save=False)
            self._folder = None
        self._stop_collecting()
        self._ends.close()

    def _stop_collecting(self) -> None:
        if self._is_collecting:
            self._is_collecting = False
            context.disable_graph_collection()

    def _draw(self) -> None:
        folder, self._folder = self._folder, None
        traced, self._graphs = traced_until_now(folder, self._graphs), None
        self._ends.close()
        if not traced.steps or not traced.operations:
            self._say(f"{self._named}: TensorFlow's profiler traced no operation of these steps; nothing is drawn")
            return
        for line in save_timeline(traced, self._directory):
            self._say(line)


def start_tracing(folder: pathlib.Path) -> None:
    """Starts TensorFlow's profiler, which traces all operations and writes its files to this folder."""
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=_ALL_OPERATIONS)
    tf.profiler.experimental.start(str(folder), options)


def traced_until_now(folder: pathlib.Path, graphs: RunGraphs) -> TracedSteps:
    """Ends the tracing that `start_tracing` began; returns what was traced."""
    tf.profiler.experimental.stop()
    spaces = [xplane_pb2.XSpace.FromString(path.read_bytes()) for path in folder.rglob("*.xplane.pb")]
    return read_trace(spaces, graphs)


def save_timeline(traced: TracedSteps, directory: pathlib.Path) -> Sequence[str]:
    """Writes timeline.png and timeline.json; returns lines for the user.

    Raises:
      UserError: a file can't be written.
    """
    intervals = intervals_of(traced)
    rows = [*sorted({one.row for one in intervals} - {HOST_ROW}, key=_in_order), HOST_ROW]
    runs = pipeline_runs(intervals)
    trace = json.dumps(chrome_trace(traced.steps, rows, intervals, traced.transfers))
    shown = dict(sorted(traced.steps.items())[:_MOST_PANELS])
    drawn = picture(shown, rows, intervals, traced.transfers, runs)
    with writing(directory / PICTURE):
        write_atomically(directory / TRACE, trace)
        write_atomically(directory / PICTURE, drawn)
    lines = [f"timeline of steps {min(traced.steps)} to {max(traced.steps)}: {directory / PICTURE}, {TRACE}"]
    if runs:
        seconds = statistics.median(span.end_seconds - span.start_seconds for span in traced.steps.values())
        lines += described(runs, seconds, traced.operations, traced.transfers)
    return lines


def _in_order(row: str) -> tuple[str, int, str]:
    """A sort key: 'CPU:10' comes after 'CPU:9', and 'CPU:9 exchange' between them."""
    kind, _, rest = row.partition(":")
    index, _, more = rest.partition(" ")
    return kind, int(index) if index.isdecimal() else 0, more
