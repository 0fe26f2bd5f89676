"""Shows the output of several processes: each line after its process's name, and a live bar on a terminal.

If the reader of a pipe is stopped, the launcher waits for it, and so do its processes. After a signal it waits no
longer: output is lost then (the logs have it), but the signal reaches the processes, and they can end.
"""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

from launch.supervision.live_bar import LiveBar
from strategies.reports.discarded_output import discarded_without_reader

# Seconds that a reader has after a signal to take a line.
_PATIENCE_SECONDS = 1.0
_TICK_SECONDS = 0.1
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class Screen(Protocol):
    """Where the lines of the processes are shown."""

    def line(self, name: str, line: bytes, *, is_error: bool) -> None:
        """Shows a line of a process, given without its newline, from its standard output or standard error."""

    def close(self) -> None:
        """Must be called after the last line."""


def never() -> bool:
    """False: nobody has asked for an end."""
    return False


def screen_for(names: Sequence[str], reporter: str, is_ending: Callable[[], bool] = never) -> Screen:
    """The screen that suits this process's standard output: a terminal or anything else.

    Args:
      names: the names of the processes, as 'worker:1', in the order of their colours.
      reporter: the process whose progress lines become the bar.
      is_ending: returns whether a signal was received; from then on a stopped reader of a pipe is not waited for.
    """
    for stream in (sys.stdout, sys.stderr):
        # Another program that has the same terminal or pipe may have made it non-blocking. A slow reader would
        # then look like a reader that is gone.
        with contextlib.suppress(OSError):
            os.set_blocking(stream.fileno(), True)
    console = Console(highlight=False)
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        return TerminalScreen(console, names, reporter)
    return PlainScreen(is_ending)


def print_line(text: str, *, is_error: bool = False, is_ending: Callable[[], bool] = never) -> None:
    """Prints a line of the launcher itself; `is_ending` as for `screen_for`."""
    stream = sys.stderr if is_error else sys.stdout
    _Output(stream, is_ending).write(text.encode(errors="backslashreplace") + b"\n")


class _Output:
    """Writes to a stream whose reader may be slow, stopped or gone."""

    def __init__(self, stream: TextIO, is_ending: Callable[[], bool]):
        self._stream, self._is_ending = stream, is_ending
        # When the reader took nothing although an end was asked for; None while it takes output.
        self._stalled_at: float | None = None
        self._is_torn = False

    def write(self, line: bytes) -> None:
        """Writes a line; after a signal the line may be lost if the reader is stopped."""
        rest = b"\n" * self._is_torn + line
        with discarded_without_reader(self._stream):
            while rest:
                if not self._takes():
                    self._is_torn = self._is_torn or len(rest) < len(line)
                    return
                # A pipe that is ready takes at least this much at once.
                part, rest = rest[: select.PIPE_BUF], rest[select.PIPE_BUF :]
                self._stream.buffer.write(part)
                self._stream.flush()
        self._is_torn = False

    def _takes(self) -> bool:
        """Waits until the reader takes something; False if it takes nothing although the end was asked for."""
        while not self._is_ready(0.0 if self._has_given_up() else _TICK_SECONDS):
            if self._has_given_up():
                return False
            if self._is_ending() and self._stalled_at is None:
                self._stalled_at = time.monotonic()
        self._stalled_at = None
        return True

    def _has_given_up(self) -> bool:
        return self._stalled_at is not None and time.monotonic() - self._stalled_at > _PATIENCE_SECONDS

    def _is_ready(self, wait_seconds: float) -> bool:
        return bool(select.select([], [self._stream.fileno()], [], wait_seconds)[1])


class PlainScreen:
    """Copies bytes unchanged: standard output to standard output, standard error to standard error."""

    def __init__(self, is_ending: Callable[[], bool] = never):
        self._outputs = {False: _Output(sys.stdout, is_ending), True: _Output(sys.stderr, is_ending)}

    def line(self, name: str, line: bytes, *, is_error: bool) -> None:
        self._outputs[is_error].write(b"[%b] %b\n" % (name.encode(), line))

    def close(self) -> None:
        pass


class TerminalScreen:
    """Lines scroll above the bar; each process name has a colour."""

    def __init__(self, console: Console, names: Sequence[str], reporter: str):
        # A character that the terminal can't encode must not end training.
        sys.stdout.reconfigure(errors="replace")
        self._console, self._reporter = console, reporter
        self._colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._bar = LiveBar(console)
        # Errors on the same terminal are printed above the bar; errors that go to a file are copied.
        self._errors = self if sys.stderr.isatty() else PlainScreen()

    def line(self, name: str, line: bytes, *, is_error: bool) -> None:
        if is_error and self._errors is not self:
            self._errors.line(name, line, is_error=True)
            return
        text = line.decode(errors="replace")
        with discarded_without_reader(sys.stdout):
            if name != self._reporter or is_error or not self._bar.takes(text):
                self._console.print(Text.assemble((f"[{name}] ", self._colours[name]), text), soft_wrap=True)

    def close(self) -> None:
        with discarded_without_reader(sys.stdout):
            self._bar.close()
