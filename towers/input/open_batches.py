"""Iterators over batches whose deletion nobody waits for.

tf.data reads ahead on threads of its own, and whoever deletes an iterator waits for two of them:

- The thread that reads a batch. If it calls Python (a generator, `tf.py_function`) while the interpreter is
  finalised, it blocks forever, and the program would hang at its exit.
- The thread that tunes the pipeline, unless autotuning is off. TensorFlow 2.21 wakes it before the iterator counts
  as cancelled, so it may go on waiting: as long as the iterator has lived, at most a minute. (Of 25 iterators that
  had lived for 0.8 s six took 0.45 s.)

So a thread of Python deletes the iterator. It needs Python's lock only before and after. Our own data are not
tuned; a user's pipeline is, because only autotuning makes its serial `map` parallel.
"""

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

# Longest wait at the exit for batches that are being read.
_EXIT_SECONDS = 3.0


class OpenBatches:
    """An iterator over batches. It is closed before the interpreter is finalised, and when nothing refers to it.

    Attributes:
      batches: the iterator itself; an empty one once it is closed.
    """

    def __init__(self, batches: Iterator):
        self.batches = batches
        self._deletion: threading.Thread | None = None
        _OPEN.add(self)

    def __iter__(self) -> "OpenBatches":
        return self

    def __next__(self) -> Any:
        return next(self.batches)

    def close(self) -> threading.Thread:
        """Reads no more batches; returns the thread that deletes the iterator."""
        if self._deletion is None:
            held, self.batches = [self.batches], iter(())
            self._deletion = threading.Thread(target=held.clear, daemon=True)
            _DELETIONS.add(self._deletion)
            self._deletion.start()
        return self._deletion

    def __del__(self):
        # Python starts no thread at its end.
        if not sys.is_finalizing():
            with contextlib.suppress(RuntimeError):
                self.close()


_OPEN: weakref.WeakSet[OpenBatches] = weakref.WeakSet()
_DELETIONS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for batches in list(_OPEN):
        batches.close()
    until = time.monotonic() + _EXIT_SECONDS
    for deletion in list(_DELETIONS):
        deletion.join(max(0.0, until - time.monotonic()))
