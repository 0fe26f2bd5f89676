"""Connections whose other side is not let in yet: only some, because anyone may connect."""

import threading
from typing import Protocol

_MOST = 128


class _Closeable(Protocol):
    def close(self) -> None:
        """Closes it, and wakes the thread that waits on it."""


class Strangers:
    """The newest connections of strangers. One more closes the oldest: a member is let in within milliseconds."""

    def __init__(self):
        self._lock = threading.Lock()
        self._oldest_first: dict[_Closeable, None] = {}

    def add(self, connection: _Closeable) -> None:
        with self._lock:
            self._oldest_first[connection] = None
            excess = list(self._oldest_first)[:-_MOST]
            for one in excess:
                del self._oldest_first[one]
        for one in excess:
            one.close()

    def remove(self, connection: _Closeable) -> None:
        """The other side is let in, or the connection has ended."""
        with self._lock:
            self._oldest_first.pop(connection, None)
