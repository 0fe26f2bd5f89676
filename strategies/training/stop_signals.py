"""SIGTERM, SIGINT and SIGHUP (the terminal was closed) as requests to stop, so that a Trainer can save first."""

import contextlib
import os
import signal
import stat
import sys
import threading

from strategies.reports.discarded_output import discard_output

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A shell's exit code for a program that a signal ended, without the signal's number.
SHELL_SIGNAL_BASE = 128


class ReceivedSignals:
    """Context manager: while active, SIGTERM, SIGINT and SIGHUP call `_receive` instead of ending this process.

    A SIGHUP that is ignored, as after nohup, stays ignored. Python delivers signals to the main thread only: in
    another thread it changes nothing.
    """

    def __init__(self):
        self._previous_handlers = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    previous = signal.signal(number, self._handle)
                    # None: a handler from before Python's start, for example of a C++ program that embeds Python,
                    # which Python can't restore.
                    self._previous_handlers[number] = signal.SIG_DFL if previous is None else previous
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        self._receive(number, frame)

    def _receive(self, number, frame) -> None:
        raise NotImplementedError


class StopSignals(ReceivedSignals):
    """Context manager: while active, the first signal makes `requested` return True, and nothing else.

    A second SIGINT raises KeyboardInterrupt at once. It also counts a signal that the previous handler recorded as
    `received` but that ended nothing, because a library caught the exception.
    """

    def __init__(self):
        super().__init__()
        self._first: int | None = None

    def __enter__(self):
        super().__enter__()
        for handler in self._previous_handlers.values():
            earlier = getattr(getattr(handler, "__self__", None), "received", None)
            self._first = self._first or earlier
        return self

    def requested(self) -> bool:
        """Whether a signal was received."""
        return self._first is not None

    @property
    def name(self) -> str:
        """The first signal, such as 'SIGTERM'; if this process received none, a text that another process did."""
        return signal.Signals(self._first).name if self._first is not None else "a signal to another process"

    def ignore_sigterm_afterwards(self) -> None:
        """Ignores SIGTERM and SIGHUP even after this context: all is saved, and the exit code must not change."""
        for number in self._previous_handlers.keys() - {signal.SIGINT}:
            self._previous_handlers[number] = signal.SIG_IGN

    def take_effect(self) -> None:
        """Sends the received signal to this process again. Call it after the context, when everything is saved."""
        if self._first is not None:
            signal.raise_signal(self._first)
            if signal.getsignal(self._first) is signal.SIG_DFL:
                # A container's first process survives the signal, and would continue as if the run were complete.
                sys.exit(SHELL_SIGNAL_BASE + self._first)

    def _receive(self, number, frame) -> None:
        if self._first is None:
            self._first = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Discards output to a terminal that was closed, which would raise errors from now on."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                discard_output(stream)
