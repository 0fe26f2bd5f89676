"""Ends a program that has nothing to save at SIGTERM, SIGHUP and Ctrl-C: one line, exit code 75, no traceback.

`end_at_early_signals` is for the imports, `EndingSignals` for the program after them.
"""

import contextlib
import os
import signal
import sys
import threading

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_EXIT_CODE = 75  # `launch.binary.INTERRUPTED`; launch.binary is imported later.


def end_at_early_signals(program: str | None) -> None:
    """Until another handler is set, SIGTERM, SIGHUP and SIGINT end this process with one line.

    Does nothing if `launch` is imported in a thread, by an interactive session, or by a module other than the
    script that Python runs.

    Args:
      program: name of the running program of launch/; None in a program of a user's own.
    """
    if threading.current_thread() is not threading.main_thread() or not (program or _is_script()):
        return
    try:
        # A copy, because stderr itself is redirected while TensorFlow is imported.
        stderr = os.dup(2)
    except OSError:
        stderr = 2  # closed
    name = program or os.path.splitext(os.path.basename(sys.argv[0]))[0]
    # A program of a user's own may set no other handler, so the signal may come later, also from `Trainer.fit`.
    when, where = (" during start-up", "") if program else ("", ", from the last checkpoint if there is one")

    def end(number, frame) -> None:
        text = f"interrupted by {signal.Signals(number).name}{when}: the same command starts again{where}"
        # The signal may come in the middle of a print, and stderr may be closed.
        with contextlib.suppress(OSError, RuntimeError):
            os.write(stderr, f"{name}: {text}\n".encode())
            sys.stdout.flush()
        os._exit(_EXIT_CODE)

    for number in _ENDING:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        if signal.getsignal(number) is usual:
            signal.signal(number, end)


class Interrupted(KeyboardInterrupt):
    """SIGTERM, SIGHUP or SIGINT, outside the work that saves something first."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)


class EndingSignals:
    """From now on the first SIGTERM, SIGHUP or SIGINT raises `Interrupted`, unless another handler is active.

    A SIGHUP that is ignored, as after nohup, stays ignored. A library may swallow the exception: by a bare
    `except`, or in C++ that asks whether an object has an attribute. Then the next signal raises again, and
    `StopSignals` handles the first one.

    Attributes:
      received: number of the first signal; None if there was none.
    """

    def __init__(self):
        self.received: int | None = None
        self._code: int | None = None
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._receive)

    @property
    def name(self) -> str | None:
        """The signal that was received, as 'SIGTERM'; None if there was none."""
        return None if self.received is None else signal.Signals(self.received).name

    def end(self, code: int) -> int:
        """Returns `code`, which no later signal changes."""
        self._code = code
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        return code

    def _receive(self, number, frame) -> None:
        if self._code is not None:
            os._exit(self._code)  # a Ctrl-C while Python shuts down
        # Cleaning up after the exception is not interrupted again, except by Ctrl-C.
        is_on_the_way_out = self.received is not None and sys.exc_info()[1] is not None
        self.received = self.received or number
        if not is_on_the_way_out or number == signal.SIGINT:
            raise Interrupted(number)


def _is_script() -> bool:
    """Whether the script that Python runs has imported `launch` itself."""
    if hasattr(sys, "ps1") or not hasattr(sys.modules.get("__main__"), "__file__"):
        return False
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("launch", "importlib"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "__main__"
