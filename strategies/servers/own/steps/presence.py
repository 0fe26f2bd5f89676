"""Which workers are connected to server 0, and which lost or late workers are replaced by another one."""

import threading
from collections.abc import Iterable


class Presence:
    """Attributes:
    lost: workers whose connection broke, until they return.
    """

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self._lock = threading.Lock()
        self._present: set[int] = set()
        self._replaced: set[int] = set()
        # For each worker the number of its connection. A restarted worker has another number.
        self._connections: dict[int, int] = {}

    def connect(self, worker: int, connection: int) -> None:
        """Records that the worker asks by this connection from now on, until it is lost."""
        self._connections[worker] = connection

    def asks_by(self, worker: int, connection: int | None) -> bool:
        """Whether this is still the connection of the worker."""
        return self._connections.get(worker) == connection

    def returned(self, worker: int) -> bool:
        """Records that a worker asks for a step; returns whether another one had replaced it."""
        with self._lock:
            self._present.add(worker)
            self.lost.discard(worker)
            was_replaced = worker in self._replaced
            self._replaced.discard(worker)
        return was_replaced

    def replace(self, worker: int | None, *, is_first: bool = True) -> bool | None:
        """Records that another worker computes for this one; returns whether this one is still connected.

        Args:
          worker: index of the worker that is replaced; None if there is none.
          is_first: False if the worker was already away when this was decided; it may have returned meanwhile.

        Returns:
          None if this was already known, if the worker has returned, or for no worker.
        """
        with self._lock:
            if worker is None or worker in self._replaced or (worker in self._present and not is_first):
                return None
            self._replaced.add(worker)
            return worker in self._present

    def leave(self, worker: int) -> bool:
        """Records that a worker's connection broke; returns whether another one had already replaced it."""
        self._connections.pop(worker, None)
        with self._lock:
            self._present.discard(worker)
            self.lost.add(worker)
            return worker in self._replaced

    def absent(self, workers: Iterable[int]) -> list[int]:
        """Those of these workers that are not connected or are replaced."""
        return sorted(set(workers) - self._present | self._replaced)
