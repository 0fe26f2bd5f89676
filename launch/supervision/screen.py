"""What a person sees of many processes: each line behind its process's name, and on a terminal one live bar."""

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
    """Where lines go."""

    def line(self, name: str, line: bytes, *, is_error: bool) -> None:
        """A line of a process, without its end, from its standard output or its standard error."""

    def close(self) -> None:
        """After the last line."""


def screen_for(names: Sequence[str], reporter: str) -> Screen:
    """The screen for where this process's output goes.

    Args:
      names: of the processes, as 'worker:1', in the order of their colours.
      reporter: whose progress lines become the bar.
    """
    console = Console(highlight=False)
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        return TerminalScreen(console, names, reporter)
    return PlainScreen()


def tell(text: str, *, is_error: bool = False) -> None:
    """A line of the launcher's own."""
    stream = sys.stderr if is_error else sys.stdout
    with _silent_if_nobody_reads(stream):
        stream.buffer.write(text.encode(errors="backslashreplace") + b"\n")
        stream.flush()


@contextlib.contextmanager
def _silent_if_nobody_reads(stream: TextIO) -> Iterator[None]:
    """Whoever read it may be gone, as a `| tee` that Ctrl-C ended: the processes go on, and so do the logs."""
    try:
        yield
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class PlainScreen:
    """Bytes as they come: standard output to standard output, standard error to standard error."""

    def line(self, name: str, line: bytes, *, is_error: bool) -> None:
        stream = sys.stderr if is_error else sys.stdout
        with _silent_if_nobody_reads(stream):
            stream.buffer.write(b"[%b] %b\n" % (name.encode(), line))
            stream.flush()

    def close(self) -> None:
        pass


class TerminalScreen:
    """Lines scroll above the bar, names have colours."""

    def __init__(self, console: Console, names: Sequence[str], reporter: str):
        # A terminal that knows no such letter is no reason to end a training.
        sys.stdout.reconfigure(errors="replace")
        self._console, self._reporter = console, reporter
        self._colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}
        self._bar = LiveBar(console)
        # On the same terminal it has to pass above the bar; in a file of its own it has not.
        self._errors = self if sys.stderr.isatty() else PlainScreen()

    def line(self, name: str, line: bytes, *, is_error: bool) -> None:
        if is_error and self._errors is not self:
            self._errors.line(name, line, is_error=True)
            return
        text = line.decode(errors="replace")
        with _silent_if_nobody_reads(sys.stdout):
            if name != self._reporter or is_error or not self._bar.takes(text):
                self._console.print(Text.assemble((f"[{name}] ", self._colours[name]), text), soft_wrap=True)

    def close(self) -> None:
        with _silent_if_nobody_reads(sys.stdout):
            self._bar.close()
