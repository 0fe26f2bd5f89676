"""Samples the memory of processes and of all that they start."""

import threading
from collections.abc import Sequence

import psutil

_SAMPLE_SECONDS = 0.2


class MemoryWatch:
    """Context manager: while active, samples the resident memory of processes and their descendants.

    Attributes:
      peak_bytes: the largest sum so far; a page that several processes share counts once for each.
    """

    def __init__(self, pids: Sequence[int]):
        self._pids, self.peak_bytes = pids, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, sum(map(_tree_bytes, self._pids)))


def _tree_bytes(pid: int) -> int:
    try:
        process = psutil.Process(pid)
        return sum(_own_bytes(each) for each in [process, *process.children(recursive=True)])
    except psutil.Error:
        return 0


def _own_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
