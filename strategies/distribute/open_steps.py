"""The steps that the chief has scheduled and that are not counted yet, and which of them are late.

ClusterCoordinator gives a step to another worker if the connection to its worker breaks. A stalled worker breaks
no connection, so its step is scheduled again; server 0 applies the first try that claims the step. The stuck
closure stays in flight, so a pause ends when all scheduled steps are counted, not when all closures are done.
"""

import time
from collections.abc import Callable, Collection

# A step is late after this many times the seconds that other steps took, if that is longer than the patience.
_TIMES_THE_LONGEST = 2.0
# If the chief has not checked for longer than this, it was busy or suspended, and may have sent workers no steps.
_SHORTEST_GAP_SECONDS, _GAPS_PER_PATIENCE = 2.0, 4


class OpenSteps:
    """The open steps of a run. A step's time starts once so few are open before it that a worker may have it."""

    def __init__(self, patience_seconds: float, num_workers: int, *, clock: Callable[[], float] = time.monotonic):
        """Args:
        patience_seconds: seconds that a step may take before it is late.
        num_workers: number of workers; a step is reported late at most that often.
        clock: the time in seconds.
        """
        self._patience_seconds, self._num_workers, self._clock = patience_seconds, num_workers, clock
        self._looked_at = clock()
        self._gap_seconds = max(_SHORTEST_GAP_SECONDS, patience_seconds / _GAPS_PER_PATIENCE)
        # When an open step's last try began, and the number of its tries.
        self._since: dict[int, float] = {}
        self._tries: dict[int, int] = {}
        # The longest time of a step that was never late; None before the first one, because the first steps
        # compile.
        self._longest: float | None = None

    def late(self, still_open: Collection[int], at_once: int) -> list[int]:
        """The steps to schedule again now.

        Args:
          still_open: all steps that were scheduled and are not counted.
          at_once: number of steps that workers compute at a time.
        """
        now, still_open = self._clock(), sorted(still_open)
        for step in self._since.keys() - set(still_open):
            seconds, tries = self._looked_at - self._since.pop(step), self._tries.pop(step)
            if tries == 1:
                self._longest = max(self._longest or 0.0, seconds)
        unseen_seconds = max(0.0, now - self._looked_at - self._gap_seconds)
        self._since = {step: since + unseen_seconds for step, since in self._since.items()}
        self._looked_at = now
        for step in still_open[:at_once]:
            self._since.setdefault(step, now)
            self._tries.setdefault(step, 1)
        if self._longest is None:
            return []
        limit = max(self._patience_seconds, _TIMES_THE_LONGEST * self._longest)
        found = [step for step, since in self._since.items() if now - since > limit]
        found = sorted(step for step in found if self._tries[step] <= self._num_workers)
        for step in found:
            self._since[step] = now
            self._tries[step] += 1
        return found
