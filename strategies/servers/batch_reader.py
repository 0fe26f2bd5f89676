"""Reads training batches by their index."""

from collections.abc import Callable

import tensorflow as tf

from strategies.data_checks.data_errors import readable_input
from towers.errors import UserError
from towers.input.open_batches import OpenBatches

# A custom pipeline restarts at its first batch, so reading and dropping some batches is faster. Our own data can
# start anywhere, in about the time of some batches.
_MOST_DROPPED = 64


class BatchReader:
    """Batches of a stream by index; fast for ascending indices with few gaps."""

    def __init__(self, dataset: Callable[[int], tf.data.Dataset], stride: int):
        """Args:
        dataset: the stream from the batch with a given index on.
        stride: difference between the indices of two batches of the stream.
        """
        self._dataset, self._stride = dataset, stride
        # By residue modulo the stride: with staleness=0 a worker also computes the turns of a lost one.
        self._streams: dict[int, _Stream] = {}

    def read(self, index: int):
        """The batch with this index; the same as before if that was the last one read.

        Raises:
          UserError: the data end before this batch.
        """
        stream = self._streams.setdefault(index % self._stride, _Stream(self._dataset, self._stride))
        return stream.read(index)


class _Stream:
    """The batches of one residue modulo the stride."""

    def __init__(self, dataset, stride):
        self._dataset, self._stride = dataset, stride
        self._iterator: OpenBatches | None = None
        self._last, self._batch = -1, None

    def read(self, index: int):
        if index == self._last:
            return self._batch
        dropped = (index - self._last) // self._stride - 1
        if self._iterator is None or not 0 <= dropped <= _MOST_DROPPED:
            self._iterator, dropped = OpenBatches(iter(self._dataset(index))), 0
        try:
            with readable_input("train", f"batch {index}"):
                for _ in range(dropped):
                    next(self._iterator)
                self._last, self._batch = index, next(self._iterator)
        except StopIteration:
            raise UserError(
                f"the training data ended at batch {index}: a task's 'train' split must not end; repeat() it"
            ) from None
        return self._batch
