"""Receives SIGTERM and SIGINT: in a training process as a request to stop, in the launcher to forward them."""

import signal


class _Received:
    """Context manager: while active, SIGTERM and SIGINT call `_receive` instead of ending this process."""

    def __init__(self):
        self._previous_handlers = {}

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _receive(self, number, frame) -> None:
        raise NotImplementedError


class StopSignals(_Received):
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
        self._previous_handlers[signal.SIGTERM] = signal.SIG_IGN

    def _receive(self, number, frame) -> None:
        if self._first is None:
            self._first = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


class ForwardedSignals(_Received):
    """Context manager: while active, collects every SIGTERM and SIGINT, for the launcher to forward.

    Attributes:
      first: the first signal received; None if there was none.
    """

    def __init__(self):
        super().__init__()
        self._pending: list[int] = []
        self.first: int | None = None

    def take(self) -> list[int]:
        """The signals received since the last call, in order."""
        taken, self._pending = self._pending, []
        return taken

    def _receive(self, number, frame) -> None:
        self.first = self.first or number
        self._pending.append(number)
