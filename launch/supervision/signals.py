"""SIGTERM and SIGINT as a wish to stop: noted when they come, obeyed between steps."""

import signal


class StopSignals:
    """Within, the first SIGTERM or SIGINT is noted; a second SIGINT interrupts at once, as usual."""

    def __init__(self):
        self._received: int | None = None
        self._before = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether one has come."""
        return self._received is not None

    @property
    def name(self) -> str:
        """Which one came: 'SIGTERM' or 'SIGINT', or that another process was sent one."""
        return signal.Signals(self._received).name if self._received is not None else "a signal to another process"

    def are_obeyed(self) -> None:
        """Everything is saved and the process is about to end: another SIGTERM must not change its exit code."""
        self._before[signal.SIGTERM] = signal.SIG_IGN

    def _note(self, number, frame) -> None:
        if self._received is None:
            self._received = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
