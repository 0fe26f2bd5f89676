"""Watches for lost and stalled workers, for the chief: warns of them, and gives their steps to other workers."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from strategies.cluster import Member
from strategies.distribute.open_steps import OpenSteps
from strategies.waiting import listens

log = logging.getLogger(__name__)

_LOOKS_PER_PATIENCE = 4
_LONGEST_PAUSE_SECONDS = 1.0


class WorkerWatch:
    """Watches the workers of a run. Not thread-safe."""

    def __init__(
        self,
        workers: Sequence[Member],
        patience_seconds: float,
        *,
        open_steps: Callable[[int], Mapping],
        count_lost: Callable[[Sequence[str]], Sequence[str]],
    ):
        """Args:
        workers: all workers.
        patience_seconds: seconds that a step may take before another worker computes it too.
        open_steps, count_lost: as the methods `open_steps` and `lost` of `Claims`.
        """
        self._workers, self._patience_seconds = workers, patience_seconds
        self._ask_open_steps, self._count_lost = open_steps, count_lost
        self._open = OpenSteps(patience_seconds, len(workers))
        self._pause_seconds = min(_LONGEST_PAUSE_SECONDS, patience_seconds / _LOOKS_PER_PATIENCE)
        self._looked_at = -math.inf

    def late_steps(self, end: int, at_once: int) -> list[int]:
        """The steps before `end` to schedule again now; it checks only from time to time.

        Args:
          end: the first step that is not scheduled.
          at_once: number of steps that the workers compute at a time.
        """
        if time.monotonic() - self._looked_at < self._pause_seconds:
            return []
        found = self._ask_open_steps(end)
        late = self._open.late(found["open"], at_once)
        self._looked_at = time.monotonic()
        if late:
            still = self._standing_still(found["quiet_seconds"])
            self._count_lost(still)
            log.warning(
                "%s gave no gradient within worker_timeout_seconds=%g at step %d: other workers compute it",
                *(" and ".join(still), self._patience_seconds, late[0]),
            )
        return late

    def _standing_still(self, quiet_seconds: Mapping[str, float]) -> list[str]:
        """The workers without a counted step for `patience_seconds`; if none or all, only the quietest one."""
        quiet = {worker.name: quiet_seconds.get(worker.name, math.inf) for worker in self._workers}
        still = [name for name, seconds in quiet.items() if seconds > self._patience_seconds]
        return still if 0 < len(still) < len(quiet) else [max(quiet, key=quiet.get)]

    def absent(self, step: int) -> list[int]:
        """Indices of the lost workers; warns of newly lost ones.

        Args:
          step: number of steps done.
        """
        found = [worker for worker in self._workers if not listens(worker.address)]
        new = self._count_lost([worker.name for worker in found]) if found else []
        for name in new:
            log.warning("%s was lost at step %d: other workers compute its steps", name, step)
        return [worker.index for worker in found]
