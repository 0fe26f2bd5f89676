"""The batches of one asynchronous worker, which computes each of them alone."""

import threading
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from strategies.data_checks.batches import as_batches
from strategies.servers.batch_reader import BatchReader
from towers.task import InputShard, Task


class OwnBatches:
    """Worker r of n reads the batches r, r + n, r + 2n, ..., so that no two workers read the same ones."""

    def __init__(
        self,
        task: Task,
        *,
        rank: int,
        num_workers: int,
        stop_asked: Callable[[], bool],
        before_step: Callable[[int], None],
    ):
        """Args:
        task: gives the data.
        rank, num_workers: index of this worker, and number of workers.
        stop_asked: whether this process was asked to stop.
        before_step: called with the number of each step before it is computed.
        """
        self._task, self._rank, self._num_workers = task, rank, num_workers
        self._stop_asked, self._before_step = stop_asked, before_step
        self._lock, self._started = threading.Lock(), time.time()
        self._batches = BatchReader(self._dataset, num_workers)

    def next_batch(self, number: np.ndarray, index: np.ndarray, plan: np.ndarray) -> list:
        """The tensors of the next batch, flat, and float64 [4]: rank, start time, seconds waited, whether to stop.

        Args:
          number: the step that asks.
          index: index of the step in its closure.
          plan: from server 0 when the closure began: the number of its steps that were already claimed, then each
            worker's next batch. A step that was already claimed is not applied, so it uses no batch.
        """
        claimed, *positions = plan.tolist()
        with self._lock:
            self._before_step(int(number))
            asked = time.perf_counter()
            batch = self._batches.read(positions[self._rank] + self._num_workers * max(0, int(index) - claimed))
            waited = time.perf_counter() - asked
        about = np.array([self._rank, self._started, waited, self._stop_asked()], np.float64)
        return [*(np.asarray(tensor) for tensor in tf.nest.flatten(batch)), about]

    def _dataset(self, first: int) -> tf.data.Dataset:
        shard = InputShard(first_batch=first, stride=self._num_workers)
        return as_batches(self._task.dataset("train", shard))
