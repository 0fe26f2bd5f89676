"""Asynchronous steps: each worker computes with a ticket, one per step, and each ticket is used once.

A staleness bound B holds because no ticket is issued that could break it. A ticket is open from its issue to its
use. While it is open, the updates of all other open tickets may be applied, and those of tickets issued later. A
worker uses its tickets in the order of their issue, so its later tickets never count against its earlier ones. A
new ticket is therefore issued only if, for every open ticket and for the new one,

    updates applied since its issue + updates that may still be applied before it <= B
"""

import collections
import dataclasses
import heapq
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence

from strategies.servers.batch_order import BatchOrder


@dataclasses.dataclass(frozen=True)
class Ticket:
    """Permission to compute one update.

    Attributes:
      step: index of the step over the whole run; it determines the learning rate and the random numbers.
      batch: index of the batch that the worker computes.
      worker: index of the worker that may use it.
      done: number of steps that were done when the ticket was issued.
      lease: number of the ticket, unique on server 0: a step that is issued again has another lease.
      time: monotonic time of its issue, in seconds; tickets that differ only in time are equal.
    """

    step: int
    worker: int
    done: int
    lease: int
    batch: int = dataclasses.field(default=-1, compare=False)
    time: float = dataclasses.field(default=0.0, compare=False)


class Admission:
    """Issues the tickets of a run.

    Attributes:
      done: number of tickets used, including those of the runs that this one resumes.
      next_lease: lease of the next ticket.
    """

    def __init__(
        self,
        first: int,
        *,
        bound: int | None,
        num_workers: int,
        first_lease: int = 0,
        positions: Sequence[int] | None = None,
        patience_seconds: float = math.inf,
        lost: Collection[int] = (),
    ):
        """Args:
        first: step of the first ticket.
        bound: largest staleness; None for no bound. With 0 the workers take turns: step n belongs to worker
          n % num_workers, and is computed on batch n.
        num_workers: number of workers.
        first_lease: lease of the first ticket.
        positions: each worker's next batch, as for `BatchOrder`.
        patience_seconds: seconds that a worker may be away before another one computes its batches too.
        lost: workers that were lost before.
        """
        self.done, self.next_lease = first, first_lease
        self._bound, self._num_workers = bound, num_workers
        self._next = self._target = first
        self._returned: list[int] = []
        self._open: dict[int, Ticket] = {}
        self._patience_seconds = patience_seconds
        self._absent: set[int] = set(lost)
        # By worker that is not, or was never, connected: since when.
        self._away_since = dict.fromkeys(range(num_workers), time.monotonic())
        self._present: set[int] = set()
        # For each worker: how many of its requests wait in `begin`, and when it last got an answer or used a
        # ticket.
        self._waiting: collections.Counter[int] = collections.Counter()
        self._answered: dict[int, float] = {}
        self._batches = BatchOrder(first, num_workers, positions)
        self._ended = False
        self._changed = threading.Condition()

    def run_to(self, target: int) -> None:
        """Issues tickets for steps below `target`."""
        self._change(lambda: setattr(self, "_target", target))

    def end(self) -> None:
        """Issues no more tickets."""
        self._change(lambda: setattr(self, "_ended", True))

    def begin(self, worker: int, seconds: float, is_lost: Callable[[], bool] = lambda: False) -> Ticket | None:
        """The worker's next ticket; None if none can be issued to it within `seconds`.

        A worker with an open ticket gets its answer at once: other workers may be waiting for that ticket.

        Args:
          worker: index of the worker.
          seconds: how long to wait.
          is_lost: whether the requesting connection is lost; it is true before `lost` is called. A ticket issued
            after `lost` would stay open, because nothing takes it back.
        """
        with self._changed:
            if is_lost():
                return None
            self._absent.discard(worker)
            self._away_since.pop(worker, None)
            self._present.add(worker)
            patience = 0 if self._busy(worker) else seconds
            self._waiting[worker] += 1
            self._changed.wait_for(lambda: self._ended or is_lost() or self._may_begin(worker), patience)
            self._waiting[worker] -= 1
            self._answered[worker] = time.monotonic()
            if self._ended or is_lost() or not self._may_begin(worker):
                return None
            step = heapq.heappop(self._returned) if self._returned else self._next
            self._next = max(self._next, step + 1)
            batch = step if self._bound == 0 else self._batches.take(worker, *self._inherited(worker))
            ticket = Ticket(step, worker, self.done, self.next_lease, batch, time.monotonic())
            self._open[step] = ticket
            self.next_lease += 1
            return ticket

    def open_from(self) -> int:
        """The lowest lease of an open ticket or of a later one: no earlier ticket can be used any more."""
        with self._changed:
            return min((ticket.lease for ticket in self._open.values()), default=self.next_lease)

    def is_open(self, ticket: Ticket) -> bool:
        """Whether the ticket's update may be applied; `use` counts it afterwards."""
        with self._changed:
            return self._open.get(ticket.step) == ticket

    def replaced(self, step: int) -> int | None:
        """The worker whose batch another one computes in this open step; None if it computes its own."""
        with self._changed:
            ticket = self._open.get(step)
            owner = None if ticket is None else self._batches.owner(ticket.batch)
            return None if owner is None or owner == ticket.worker else owner

    def use(self, ticket: Ticket) -> bool:
        """Counts a ticket's update; False if the ticket is no longer open."""
        with self._changed:
            if self._open.get(ticket.step) != ticket:
                return False
            del self._open[ticket.step]
            self._answered[ticket.worker] = time.monotonic()
            self.done += 1
            self._changed.notify_all()
            return True

    def lost(self, worker: int) -> None:
        """Takes back the open tickets of a lost worker; other workers get their steps."""
        with self._changed:
            self._absent.add(worker)
            self._away_since.setdefault(worker, time.monotonic())
            self._present.discard(worker)
            for ticket in [ticket for ticket in self._open.values() if ticket.worker == worker]:
                del self._open[ticket.step]
                heapq.heappush(self._returned, ticket.step)
                if self._bound != 0:
                    self._batches.give_back(ticket.batch)
            self._changed.notify_all()

    def positions(self) -> list[int] | None:
        """Each worker's next batch; None if that is the next step's."""
        with self._changed:
            return None if self._bound == 0 else list(self._batches.positions)

    def overdue(self, seconds: float) -> set[int]:
        """Workers with a ticket open for more than `seconds`, or without a request for a ticket for that time.

        A worker that must wait is not overdue: its request counts until it is answered, and it asks again at once.
        """
        with self._changed:
            since = time.monotonic() - seconds
            silent = {worker for worker in self._present if not self._waiting[worker] and not self._busy(worker)}
            return {ticket.worker for ticket in self._open.values() if ticket.time < since} | {
                worker for worker in silent if self._answered[worker] < since
            }

    def missing(self, workers: range) -> list[int]:
        """The workers that have an open ticket."""
        with self._changed:
            return [worker for worker in workers if self._busy(worker)]

    def wait(self, done: int, seconds: float) -> bool:
        """Waits at most `seconds`; returns whether `done` tickets were used."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self.done >= done, seconds)

    def pause(self, seconds: float) -> bool:
        """Issues no ticket until the next `run_to`; waits at most `seconds`; returns whether none is open."""
        with self._changed:
            self._target = 0
            return self._changed.wait_for(lambda: not self._open, seconds)

    def _change(self, change) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    def _busy(self, worker: int) -> bool:
        return any(ticket.worker == worker for ticket in self._open.values())

    def _may_begin(self, worker: int) -> bool:
        step = self._returned[0] if self._returned else self._next
        return step < self._target and self._in_bounds(worker) and self._is_turn_of(worker, step)

    def _in_bounds(self, worker: int) -> bool:
        if self._bound is None:
            return True
        own_and_later = collections.Counter()
        # From the newest ticket to the oldest.
        for ticket in reversed(self._open.values()):
            own_and_later[ticket.worker] += 1
            before = len(self._open) - own_and_later[ticket.worker] + (ticket.worker != worker)
            if self.done - ticket.done + before > self._bound:
                return False
        return len(self._open) <= self._bound

    def _is_turn_of(self, worker: int, step: int) -> bool:
        if self._bound != 0:
            return True
        owner = step % self._num_workers
        if owner not in self._absent:
            return worker == owner
        return worker == self._heir(owner)

    def _inherited(self, worker: int) -> list[int]:
        """The workers that have been away for so long that this one computes their batches too."""
        latest = time.monotonic() - self._patience_seconds
        away = [owner for owner, since in self._away_since.items() if since < latest]
        return [owner for owner in away if self._heir(owner) == worker]

    def _heir(self, owner: int) -> int:
        """The next present worker. Only it does a lost worker's work, so it reads these batches in order."""
        return min(self._present, key=lambda other: (other - owner) % self._num_workers)
