"""The progress of a run for a person: a live bar on a terminal, plain lines elsewhere."""

import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from strategies.callbacks import Callback, Run
from strategies.contract import StepReport
from strategies.reports.discarded_output import discard_output

log = logging.getLogger(__name__)


class _Console(Console):
    """A console whose reader may end, for example `| head`: Rich itself would end the program then."""

    def on_broken_pipe(self) -> None:
        _discard(self, os.strerror(errno.EPIPE))


class ProgressDisplay(Callback):
    """A rich progress bar, or one line every `line_seconds` if the output is not a terminal."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        line_seconds: float = 10.0,
        worded: Callable[[str], str] = str,
    ):
        """Args:
        console: where to write; None for stdout.
        line_seconds: time between lines if the output is not a terminal.
        worded: rewrites a message for the program's user, who may know arguments by other names.
        """
        self._worded = worded
        self._console = console or _Console(highlight=False, soft_wrap=True)
        self._line_seconds = line_seconds
        self._bar: Progress | None = None

    def begin(self, run: Run) -> None:
        self._run = run
        self._started = self._last_line = time.monotonic()
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(
                "training", total=run.last_step, completed=run.first_step, numbers="compiling the first step"
            )
            if not self._shown(self._bar.start):
                self._bar = None

    def steps(self, report: StepReport) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step, numbers=_numbers(report))
        now = time.monotonic()
        if now - self._last_line < self._line_seconds and report.step < self._run.last_step:
            return
        self._last_line = now
        if self._bar is None:
            left = _left_seconds(report.step, self._run, now - self._started)
            self._print(f"step {report.step}/{self._run.last_step}  {_numbers(report)}  {left} left")
        for section in report.sections.values():
            self._print(f"step {report.step}  {section.progress_line()}")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        written = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._print(f"step {step}  evaluation  {written}")

    def message(self, text: str) -> None:
        self._print(self._worded(text))

    def end(self) -> None:
        if self._bar is not None:
            self._shown(self._bar.stop)
            self._bar = None

    def _print(self, text: str) -> None:
        # The bar's own console redraws the bar below the line.
        self._shown(lambda: self._console.print(text, markup=False))

    def _shown(self, show: Callable[[], None]) -> bool:
        """Calls `show`, which writes to the console. Returns whether it could; training continues anyway."""
        try:
            show()
            return True
        except OSError as error:
            _discard(self._console, error.strerror)
            return False


def _discard(console: Console, why: str) -> None:
    """Discards all further output, and warns of that."""
    log.warning("progress can't be written (%s): it is not shown from now on", why)
    # Also what the file has buffered. A file without a descriptor buffers nothing.
    with contextlib.suppress(OSError):
        discard_output(console.file.fileno())


def _numbers(report: StepReport) -> str:
    means = {"loss": report.loss, **report.metrics}
    written = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
    step_milliseconds = 1e3 * report.seconds / report.num_steps
    waiting = 100.0 * report.input_seconds / max(report.seconds, 1e-9)
    return (
        f"{written}  {report.examples_per_second:,.0f} examples/s  "
        f"{step_milliseconds:.0f} ms/step  input {waiting:.0f}%"
    )


def _left_seconds(step: int, run: Run, elapsed_seconds: float) -> str:
    done = step - run.first_step
    if done <= 0:
        return "?"
    seconds = math.ceil(elapsed_seconds / done * (run.last_step - step))
    return f"{seconds // 60}:{seconds % 60:02d}"
