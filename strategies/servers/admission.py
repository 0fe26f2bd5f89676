"""Asynchronous steps: each worker computes with a ticket, one per step, and each ticket is used once.

A staleness bound B holds because no ticket is issued that could break it. A ticket is open from its issue to its
use. While it is open, these updates may be applied: those of all tickets that are open now, and those of tickets
issued later. A worker uses its tickets in the order of their issue, so its later tickets never count against its
earlier ones. A new ticket is therefore issued only if, for every open ticket and for the new one,

    updates applied since its issue + updates that may still be applied before it <= B
"""

import collections
import dataclasses
import heapq
import threading
import time


@dataclasses.dataclass(frozen=True)
class Ticket:
    """Permission to compute one update.

    Attributes:
      step: index of the step over the whole run; it decides the learning rate and the random numbers.
      worker: index of the worker that may use it.
      done: number of steps that were done when it was issued.
      lease: number of the ticket among all of server 0: a step that is issued again has another one.
      time: monotonic time of its issue, in seconds; two tickets that differ only in it are equal.
    """

    step: int
    worker: int
    done: int
    lease: int
    time: float = dataclasses.field(default=0.0, compare=False)


class Admission:
    """Issues the tickets of a run.

    Attributes:
      done: number of tickets used, including those of the runs that this one resumes.
      next_lease: lease of the next ticket.
    """

    def __init__(self, first: int, *, bound: int | None, num_workers: int, first_lease: int = 0):
        """Args:
        first: step of the first ticket.
        bound: largest staleness; None for no bound. With 0 the workers take turns: step n belongs to worker
          n % num_workers.
        num_workers: number of workers.
        first_lease: lease of the first ticket.
        """
        self.done, self.next_lease = first, first_lease
        self._bound, self._num_workers = bound, num_workers
        self._next = self._target = first
        self._returned: list[int] = []
        self._open: dict[int, Ticket] = {}
        self._absent: set[int] = set()
        self._ended = False
        self._changed = threading.Condition()

    def run_to(self, target: int) -> None:
        """Issues tickets for steps below `target`."""
        self._change(lambda: setattr(self, "_target", target))

    def end(self) -> None:
        """Issues no more tickets."""
        self._change(lambda: setattr(self, "_ended", True))

    def begin(self, worker: int, seconds: float) -> Ticket | None:
        """The worker's next ticket; None if none can be issued to it within `seconds`.

        A worker with an open ticket gets its answer at once: other workers may be waiting for that ticket.
        """
        with self._changed:
            self._absent.discard(worker)
            patience = 0 if self._busy(worker) else seconds
            self._changed.wait_for(lambda: self._ended or self._may_begin(worker), patience)
            if self._ended or not self._may_begin(worker):
                return None
            step = heapq.heappop(self._returned) if self._returned else self._next
            self._next = max(self._next, step + 1)
            ticket = self._open[step] = Ticket(step, worker, self.done, self.next_lease, time.monotonic())
            self.next_lease += 1
            return ticket

    def open_from(self) -> int:
        """The lowest lease of an open ticket or of a later one: no earlier ticket can be used any more."""
        with self._changed:
            return min((ticket.lease for ticket in self._open.values()), default=self.next_lease)

    def is_open(self, ticket: Ticket) -> bool:
        """Whether the ticket's update may be applied; `use` counts it after that."""
        with self._changed:
            return self._open.get(ticket.step) == ticket

    def use(self, ticket: Ticket) -> bool:
        """Counts a ticket's update; False if the ticket is no longer open."""
        with self._changed:
            if self._open.get(ticket.step) != ticket:
                return False
            del self._open[ticket.step]
            self.done += 1
            self._changed.notify_all()
            return True

    def lost(self, worker: int) -> None:
        """Takes the open tickets of a lost worker back; other workers get their steps."""
        with self._changed:
            self._absent.add(worker)
            for step in [ticket.step for ticket in self._open.values() if ticket.worker == worker]:
                del self._open[step]
                heapq.heappush(self._returned, step)
            self._changed.notify_all()

    def overdue(self, seconds: float) -> set[int]:
        """Workers with a ticket that has been open for more than `seconds`."""
        with self._changed:
            since = time.monotonic() - seconds
            return {ticket.worker for ticket in self._open.values() if ticket.time < since}

    def missing(self, workers: range) -> list[int]:
        """The workers that have an open ticket."""
        with self._changed:
            return [worker for worker in workers if self._busy(worker)]

    def wait(self, done: int, seconds: float) -> bool:
        """Waits at most `seconds`; whether `done` tickets were used."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self.done >= done, seconds)

    def pause(self, seconds: float) -> bool:
        """Issues no ticket until the next `run_to` and waits at most `seconds`; whether no ticket is open."""
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
        # From the ticket issued last to the one issued first.
        for ticket in reversed(self._open.values()):
            own_and_later[ticket.worker] += 1
            before = len(self._open) - own_and_later[ticket.worker] + (ticket.worker != worker)
            if self.done - ticket.done + before > self._bound:
                return False
        return len(self._open) <= self._bound

    def _is_turn_of(self, worker: int, step: int) -> bool:
        owner = step % self._num_workers
        return self._bound != 0 or owner == worker or owner in self._absent
