"""Limits the number of connections that wait to be let in, because anyone may connect.

What each may send, and for how long, is in `entrance.py`.
"""

import threading
from typing import Protocol

_MOST = 128


class _Endable(Protocol):
    def end(self) -> None:
        """Ends the connection, and wakes the thread that waits on it."""


class Strangers:
    """The newest connections of strangers. One more ends the oldest: a member is let in within milliseconds."""

    def __init__(self):
        self._lock = threading.Lock()
        self._oldest_first: dict[_Endable, None] = {}

    def add(self, connection: _Endable) -> None:
        with self._lock:
            self._oldest_first[connection] = None
            excess = list(self._oldest_first)[:-_MOST]
            for one in excess:
                del self._oldest_first[one]
        for one in excess:
            one.end()

    def remove(self, connection: _Endable) -> None:
        """Removes a connection whose other side is let in, or that has ended."""
        with self._lock:
            self._oldest_first.pop(connection, None)
