"""Which batches asynchronous workers compute: worker r of n has the batches r, r + n, r + 2n, ..., each once.

Server 0 hands them out. So a worker that starts again goes on where it was: no batch is repeated or left out.
"""

from collections.abc import Sequence


class BatchOrder:
    """Each worker's next batch.

    Attributes:
      positions: index of each worker's next batch.
    """

    def __init__(self, first: int, num_workers: int, positions: Sequence[int] | None = None):
        """Args:
        first: number of batches that were used before.
        num_workers: number of workers.
        positions: each worker's next batch, as a checkpoint has it. Without it, or if it is of another number of
          workers, each worker begins with its first batch from `first` on.
        """
        self._num_workers = num_workers
        if positions is None or len(positions) != num_workers:
            positions = [first + (worker - first) % num_workers for worker in range(num_workers)]
        self.positions = list(positions)

    def take(self, worker: int) -> int:
        """The worker's next batch."""
        batch = self.positions[worker]
        self.positions[worker] += self._num_workers
        return batch

    def give_back(self, worker: int, batch: int) -> None:
        """The worker has not used this batch and none that it took later."""
        self.positions[worker] = min(self.positions[worker], batch)
