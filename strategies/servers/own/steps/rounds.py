"""Synchronous steps: which worker computes which part of the current round, and when the round is complete.

A round is one step. Part n of its batch belongs to worker n, and each part is computed with a lease:

    worker 0    lease of part 0 ---> gradient, then lease of part 1 ---> gradient counts
    worker 1    lease of part 1 ---> is lost, or stands still . . . . . . . . . . . gradient is refused

The part of a worker that is lost, or that sends no gradient in time, is leased to a worker that has sent its own.
Both compute the part from the same examples, parameters and seeds, so the first gradient of a part counts.

With backup workers a round needs only the first `needed` gradients: a later worker's gradient is turned away, and
that worker begins the next round from new parameters (Chen et al. 2016, "Revisiting distributed synchronous SGD").
"""

import collections
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

# A part is late after this many times the seconds of the round's slowest gradient, if that is longer than the
# patience: where all steps are long, no worker is stalled.
_TIMES_THE_SLOWEST = 2.0
_SHORTEST_TICK_SECONDS = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
    """Permission to compute one part of a round.

    Attributes:
      number: unique number of the lease.
      step: step of the round.
      part: index of the part; it is also the index of the worker that the part belongs to.
      worker: index of the worker that computes it.
      replaces: index of the lost or late worker that this worker replaces; None if there is none.
      is_first: whether the replaced worker was neither lost nor late before this lease.
      time: monotonic time of its issue, in seconds.
    """

    number: int
    step: int
    part: int
    worker: int
    replaces: int | None
    is_first: bool
    time: float


class Rounds:
    """The rounds of a run.

    Attributes:
      done: number of rounds applied, including those of the runs that this one resumes; it is also the step of the
        current round.
      turned_away: number of gradients that came too late.
    """

    def __init__(
        self,
        first: int,
        *,
        num_workers: int,
        needed: int,
        patience_seconds: float = math.inf,
        numbers: Iterator[int] | None = None,
        lost: Collection[int] = (),
    ):
        """Args:
        first: step of the first round.
        num_workers: number of workers, and of a round's parts.
        needed: number of gradients that complete a round.
        patience_seconds: seconds that a worker may take for its part before another worker computes it too.
        numbers: iterator over the leases' numbers; None counts from 0.
        lost: workers that were lost before.
        """
        self.done, self.turned_away = first, 0
        self._num_workers, self._needed, self._patience_seconds = num_workers, needed, patience_seconds
        self._target, self._ended = first, False
        self._numbers = itertools.count() if numbers is None else numbers
        # Of the current round: the leases whose gradients may still come, and sets of parts by their state.
        self._leases: dict[int, Lease] = {}
        self._by_part: dict[int, dict[int, Lease]] = collections.defaultdict(dict)
        self._admitted: set[int] = set()
        self._given: dict[int, Lease] = {}
        self._turned_away: set[int] = set()
        self._opened, self._slowest_seconds = time.monotonic(), 0.0
        # Workers that began a step in this run, and those that were lost or late and have not returned since.
        self._seen: set[int] = set(lost)
        self._away: set[int] = set(lost)
        self._changed = threading.Condition()

    @property
    def away(self) -> set[int]:
        """Workers that were lost or late and have not asked for a part since."""
        with self._changed:
            return set(self._away)

    def run_to(self, target: int) -> None:
        """Lets the rounds of steps below `target` begin."""
        with self._changed:
            if self._target <= self.done < target:
                self._opened = time.monotonic()
            self._target = target
            self._changed.notify_all()

    def end(self) -> None:
        """Begins no more rounds."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def begin(self, worker: int, seconds: float, is_lost: Callable[[], bool] = lambda: False) -> Lease | None:
        """A part for the worker to compute: its own, or that of a worker that is away; None if there is none
        within `seconds`, or if the connection that asks is lost (as for `Admission.begin`)."""
        with self._changed:
            if is_lost():
                return None
            self._seen.add(worker)
            self._away.discard(worker)
            until = time.monotonic() + seconds
            # No event wakes this thread when a part becomes late, so it checks several times.
            tick = max(_SHORTEST_TICK_SECONDS, self._patience_seconds / 4)
            while (part := self._part_for(worker)) is None and not (self._ended or is_lost()):
                if (left := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left, tick))
            if part is None or self._ended or is_lost():
                return None
            replaces = self._replaced_by(worker, part)
            is_first = replaces is not None and replaces not in self._away
            if is_first:
                self._away.add(replaces)
            number = next(self._numbers)
            lease = Lease(
                number=number,
                step=self.done,
                part=part,
                worker=worker,
                replaces=replaces,
                is_first=is_first,
                time=time.monotonic(),
            )
            self._turned_away.discard(part)
            self._leases[number] = self._by_part[part][number] = lease
            return lease

    def admit(self, number: int) -> bool:
        """Whether the round accepts the gradient of a lease; a worker asks before it sends the gradient."""
        with self._changed:
            lease = self._leases.get(number)
            if lease is not None and lease.part not in self._given:
                promised = sum(self._is_expected(part) for part in self._admitted)
                if lease.part in self._admitted or promised < self._needed:
                    self._admitted.add(lease.part)
                    return True
                self._turned_away.add(lease.part)
            self._take_back(number)
            self.turned_away += 1
            return False

    def give(self, number: int) -> Sequence[Lease] | None:
        """Counts a gradient that all servers hold.

        Returns:
          The leases whose gradients form the round, by part, if this one completes it; else None.
        """
        with self._changed:
            lease = self._take_back(number)
            if lease is None or lease.part not in self._admitted or lease.part in self._given:
                return None
            if len(self._given) == self._needed:
                return None
            self._given[lease.part] = lease
            self._slowest_seconds = max(self._slowest_seconds, time.monotonic() - lease.time)
            is_complete = len(self._given) == self._needed
            return [self._given[part] for part in sorted(self._given)] if is_complete else None

    def applied(self) -> None:
        """Ends the current round; the next one begins."""
        with self._changed:
            self.done += 1
            for members in (self._leases, self._by_part, self._admitted, self._given, self._turned_away):
                members.clear()
            self._opened, self._slowest_seconds = time.monotonic(), 0.0
            self._changed.notify_all()

    def lost(self, worker: int) -> None:
        """Takes back a lost worker's leases: the first worker that asks computes these parts.

        If its gradient had been admitted, workers that were turned away may compute their parts again instead.
        """
        with self._changed:
            self._seen.add(worker)
            self._away.add(worker)
            for lease in [lease for lease in self._leases.values() if lease.worker == worker]:
                self._take_back(lease.number)
                if lease.part not in self._given and not self._by_part[lease.part]:
                    self._admitted.discard(lease.part)
            self._changed.notify_all()

    def overdue(self, seconds: float) -> set[int]:
        """An empty set: no connection is closed, because other workers take over a late worker's part."""
        return set()

    def missing(self, workers: range) -> list[int]:
        """The workers whose parts of the current round have no gradient."""
        with self._changed:
            return [worker for worker in workers if worker not in self._given]

    def wait(self, done: int, seconds: float) -> bool:
        """Waits at most `seconds`; returns whether `done` rounds were applied."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self.done >= done, seconds)

    def pause(self, seconds: float) -> bool:
        """Begins no round until the next `run_to`; waits at most `seconds`; returns whether none is open."""
        with self._changed:
            # A round that some workers have begun can end only if the others may begin it too.
            self._target = self.done + self._is_under_way
            self._changed.notify_all()
            idle = self._changed.wait_for(lambda: not self._is_under_way, seconds)
            if idle:
                # All workers that had begun the round may have been lost: the round must not begin now.
                self._target = self.done
            return idle

    @property
    def _is_under_way(self) -> bool:
        """Whether the current round was begun and can end, which it can't if all its workers are lost."""
        is_complete = len(self._given) == self._needed
        return bool(self._leases or is_complete or (self._given and self._seen - self._away))

    def _take_back(self, number: int) -> Lease | None:
        lease = self._leases.pop(number, None)
        if lease is not None:
            del self._by_part[lease.part][number]
        return lease

    def _part_for(self, worker: int) -> int | None:
        """The part that the worker may compute now."""
        if self.done >= self._target or any(lease.worker == worker for lease in self._leases.values()):
            return None
        is_free = worker not in self._given and not self._is_computed(worker)
        if is_free and worker not in self._turned_away:
            return worker
        left = [part for part in range(self._num_workers) if not self._is_expected(part)]
        if self._num_workers - len(left) >= self._needed:
            return None
        return min(left, key=lambda part: (part != worker, part in self._turned_away, part))

    def _is_expected(self, part: int) -> bool:
        """Whether the round has the part's gradient, or a worker that is not late will send it."""
        if part in self._given or self._is_computed(part):
            return True
        if part not in self._seen:
            return True  # the worker is starting: the chief waits for it
        if part in self._turned_away or part in self._away or self._by_part[part]:
            return False
        return self._is_in_time(self._opened)

    def _is_computed(self, part: int) -> bool:
        """Whether a worker that is not late computes the part."""
        leases = self._by_part[part].values()
        return any(lease.worker not in self._away and self._is_in_time(lease.time) for lease in leases)

    def _replaced_by(self, worker: int, part: int) -> int | None:
        """The lost or late worker that `worker` replaces by computing this part; None if it replaces none."""
        if self._by_part[part]:
            return next(reversed(self._by_part[part].values())).worker
        return None if part == worker or part in self._turned_away else part

    def _is_in_time(self, since: float) -> bool:
        limit = max(self._patience_seconds, _TIMES_THE_SLOWEST * self._slowest_seconds)
        return time.monotonic() - since <= limit
