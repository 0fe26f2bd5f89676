"""Which batches asynchronous workers compute: worker r of n computes the batches r, r + n, r + 2n, ..., each once.

Server 0 assigns them. So a worker that restarts continues where it was, and if it does not return, another one can
compute its batches: no batch is repeated or left out.
"""

from collections.abc import Sequence


class BatchOrder:
    """Each worker's next batch."""

    def __init__(self, first: int, num_workers: int, positions: Sequence[int] | None = None):
        """Args:
        first: number of batches that were already used.
        num_workers: number of workers.
        positions: each worker's next batch, from a checkpoint. If None, or for another number of workers, each
          worker begins with its first batch from `first` on.
        """
        self._num_workers = num_workers
        if positions is None or len(positions) != num_workers:
            positions = [first + (worker - first) % num_workers for worker in range(num_workers)]
        self._next = list(positions)
        # For each worker, the batches before its next one that were given back.
        self._returned: list[set[int]] = [set() for _ in range(num_workers)]

    @property
    def positions(self) -> list[int]:
        """Index of each worker's next batch."""
        return [min(returned, default=after) for returned, after in zip(self._returned, self._next, strict=True)]

    def owner(self, batch: int) -> int:
        """The worker to which the batch belongs."""
        return batch % self._num_workers

    def take(self, worker: int, *others: int) -> int:
        """Takes the next batch of the worker or of one of `others`, whichever is earliest."""
        positions = self.positions
        owner = min((worker, *others), key=positions.__getitem__)
        batch = positions[owner]
        if batch in self._returned[owner]:
            self._returned[owner].remove(batch)
        else:
            self._next[owner] += self._num_workers
        return batch

    def give_back(self, batch: int) -> None:
        """Returns a batch that was taken but not used."""
        self._returned[self.owner(batch)].add(batch)
