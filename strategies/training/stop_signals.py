"""SIGTERM and SIGINT as a request to stop: a Trainer saves first."""

import signal
import threading


class ReceivedSignals:
    """Context manager: while active, SIGTERM and SIGINT call `_receive` instead of ending this process.

    Python delivers signals to the main thread only: in another thread it changes nothing.
    """

    def __init__(self):
        self._previous_handlers = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _receive(self, number, frame) -> None:
        raise NotImplementedError


class StopSignals(ReceivedSignals):
    """Context manager: while active, the first SIGTERM or SIGINT makes `requested` return True, and nothing else.

    A second SIGINT raises KeyboardInterrupt at once.
    """

    def __init__(self):
        super().__init__()
        self._first: int | None = None

    def requested(self) -> bool:
        """Whether a signal was received."""
        return self._first is not None

    @property
    def name(self) -> str:
        """The first signal, 'SIGTERM' or 'SIGINT'; if this process received none, that another process did."""
        return signal.Signals(self._first).name if self._first is not None else "a signal to another process"

    def ignore_sigterm_afterwards(self) -> None:
        """Ignores SIGTERM after this context too: everything is saved, and the exit code must not change."""
        if self._previous_handlers:
            self._previous_handlers[signal.SIGTERM] = signal.SIG_IGN

    def take_effect(self) -> None:
        """Sends this process the received signal again. Call it after the context, when everything is saved."""
        if self._first is not None:
            signal.raise_signal(self._first)

    def _receive(self, number, frame) -> None:
        if self._first is None:
            self._first = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
