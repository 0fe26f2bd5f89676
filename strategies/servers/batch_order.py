"""Which batches asynchronous workers compute: worker r of n has the batches r, r + n, r + 2n, ..., each once.

Server 0 hands them out. So a worker that starts again goes on where it was, and if it does not come back, another
one can compute its batches: no batch is repeated or left out.
"""

from collections.abc import Sequence


class BatchOrder:
    """Each worker's next batch."""

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
        self._next = list(positions)
        # Of each worker, the batches before its next one that were given back.
        self._returned: list[set[int]] = [set() for _ in range(num_workers)]

    @property
    def positions(self) -> list[int]:
        """Index of each worker's next batch."""
        return [min(returned, default=after) for returned, after in zip(self._returned, self._next, strict=True)]

    def owner(self, batch: int) -> int:
        """The worker whose batch it is."""
        return batch % self._num_workers

    def take(self, worker: int, *others: int) -> int:
        """The worker's next batch; or that of one of the others, whichever is earlier."""
        positions = self.positions
        owner = min((worker, *others), key=positions.__getitem__)
        batch = positions[owner]
        if batch in self._returned[owner]:
            self._returned[owner].remove(batch)
        else:
            self._next[owner] += self._num_workers
        return batch

    def give_back(self, batch: int) -> None:
        """Whoever took this batch has not used it."""
        self._returned[self.owner(batch)].add(batch)
