"""Samples the memory of processes and of all that they start."""

import threading
import time
from collections.abc import Sequence

import psutil

_SAMPLE_SECONDS = 0.2
# A process that was just forked, to run another program, still shares its parent's memory.
_FORK_SECONDS = 1.0


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
        return sum(_own_bytes(each) for each in [process, *_grown(process.children(recursive=True))])
    except psutil.Error:
        return 0


def _grown(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The processes that were started at least `_FORK_SECONDS` ago."""
    begun = time.time() - _FORK_SECONDS
    return [each for each in processes if each.create_time() <= begun]


def _own_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
