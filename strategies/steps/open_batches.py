"""Iterators over batches that are closed before the interpreter exits.

tf.data reads ahead on its own threads. A thread that calls Python (a generator, `tf.py_function`) while the
interpreter is finalised blocks forever, and the destructor of its iterator waits for it: the program would hang at
exit.
"""

import atexit
import weakref
from collections.abc import Iterator
from typing import Any


class OpenBatches:
    """An iterator over batches. It is closed before the interpreter is finalised.

    Attributes:
      batches: the iterator itself; an empty one once it is closed.
    """

    def __init__(self, batches: Iterator):
        self.batches = batches
        _OPEN.add(self)

    def __iter__(self) -> "OpenBatches":
        return self

    def __next__(self) -> Any:
        return next(self.batches)

    def close(self) -> None:
        """Waits for reads in progress, and reads no more."""
        self.batches = iter(())


_OPEN: weakref.WeakSet[OpenBatches] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for batches in list(_OPEN):
        batches.close()
