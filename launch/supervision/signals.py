"""Receives SIGTERM, SIGINT and SIGHUP in the launcher, to forward them."""

from strategies.training.stop_signals import ReceivedSignals


class ForwardedSignals(ReceivedSignals):
    """Context manager: while active, collects every SIGTERM, SIGINT and SIGHUP, for the launcher to forward.

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
