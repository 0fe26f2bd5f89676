"""SIGTERM and SIGINT as messages to pass on: each is noted, and none ends this process."""

import signal


class ReceivedSignals:
    """Within, they are noted in the order in which they come."""

    def __init__(self):
        self._waiting: list[int] = []
        self._before = {}
        self.first: int | None = None

    def __enter__(self) -> "ReceivedSignals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> list[int]:
        """Those that came since the last call."""
        taken, self._waiting = self._waiting, []
        return taken

    def _note(self, number, frame) -> None:
        self.first = self.first or number
        self._waiting.append(number)
