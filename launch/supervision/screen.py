"""Shows the output of several processes: each line after its process's name, and a live bar on a terminal."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

from launch.supervision.live_bar import LiveBar

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class Screen(Protocol):
    """Where the lines of the processes are shown."""

    def line(self, name: str, line: bytes, *, is_error: bool) -> None:
        """Shows a line of a process, given without its newline, from its standard output or standard error."""

    def close(self) -> None:
        """Must be called after the last line."""


def screen_for(names: Sequence[str], reporter: str) -> Screen:
    """The screen that suits this process's standard output: a terminal or anything else.

    Args:
      names: the names of the processes, as 'worker:1', in the order of their colours.
      reporter: the process whose progress lines become the bar.
    """
    for stream in (sys.stdout, sys.stderr):
        # Another program that has the same terminal or pipe may have made it non-blocking. A slow reader would
        # then look like a reader that is gone.
        with contextlib.suppress(OSError):
            os.set_blocking(stream.fileno(), True)
    console = Console(highlight=False)
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        return TerminalScreen(console, names, reporter)
    return PlainScreen()


def print_line(text: str, *, is_error: bool = False) -> None:
    """Prints a line of the launcher itself."""
    stream = sys.stderr if is_error else sys.stdout
    with _silent_without_reader(stream):
        stream.buffer.write(text.encode(errors="backslashreplace") + b"\n")
        stream.flush()


@contextlib.contextmanager
def _silent_without_reader(stream: TextIO) -> Iterator[None]:
    """Context manager: discards the output if its reader is gone, for example a `| tee` after Ctrl-C."""
    try:
        yield
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class PlainScreen:
    """Copies bytes unchanged: standard output to standard output, standard error to standard error."""

    def line(self, name: str, line: bytes, *, is_error: bool) -> None:
        stream = sys.stderr if is_error else sys.stdout
        with _silent_without_reader(stream):
            stream.buffer.write(b"[%b] %b\n" % (name.encode(), line))
            stream.flush()

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
        with _silent_without_reader(sys.stdout):
            if name != self._reporter or is_error or not self._bar.takes(text):
                self._console.print(Text.assemble((f"[{name}] ", self._colours[name]), text), soft_wrap=True)

    def close(self) -> None:
        with _silent_without_reader(sys.stdout):
            self._bar.close()
