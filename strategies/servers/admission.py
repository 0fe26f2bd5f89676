"""Who may compute when, without waiting for all: steps are handed out as tickets, each used up once.

A bound B on staleness is kept by handing out no ticket that could break it: between a ticket's handing out and its
use, the updates of all that are out now may come, and those of tickets handed out meanwhile. A worker uses its own
in the order it got them, so its later ones never come before an earlier one. So another is handed out only if for
each that is out, and for the new one, updates so far + those that may still come before it <= B.
"""

import collections
import dataclasses
import heapq
import threading
import time


@dataclasses.dataclass(frozen=True)
class Ticket:
    """Leave to compute one update.

    Attributes:
      number: the step, from 0 over the whole run; the learning rate and the random numbers are its.
      worker: whose it is.
      done: updates that had been finished when it was handed out.
      time: on the monotonic clock, when that was; its user need not know.
    """

    number: int
    worker: int
    done: int
    time: float = dataclasses.field(default=0.0, compare=False)


class Admission:
    """Tickets of a run.

    Attributes:
      done: tickets used up, those of earlier runs included.
    """

    def __init__(self, first: int, *, bound: int | None, num_workers: int):
        """Args:
        first: number of the first ticket.
        bound: on staleness; None for none. With 0 the workers take turns: ticket n is worker n % num_workers's.
        num_workers: how many there are.
        """
        self.done = first
        self._bound, self._num_workers = bound, num_workers
        self._next = self._target = first
        self._returned: list[int] = []
        self._out: dict[int, Ticket] = {}
        self._absent: set[int] = set()
        self._ended = False
        self._changed = threading.Condition()

    def run_to(self, target: int) -> None:
        """Hands out tickets below `target`."""
        self._change(lambda: setattr(self, "_target", target))

    def end(self) -> None:
        """Hands out nothing more."""
        self._change(lambda: setattr(self, "_ended", True))

    def begin(self, worker: int, seconds: float) -> Ticket | None:
        """The worker's next ticket; None if there is none for it in that time.

        Who has one out is not kept waiting: others may wait for that one.
        """
        with self._changed:
            self._absent.discard(worker)
            patience = 0 if self._busy(worker) else seconds
            self._changed.wait_for(lambda: self._ended or self._may_begin(worker), patience)
            if self._ended or not self._may_begin(worker):
                return None
            number = heapq.heappop(self._returned) if self._returned else self._next
            self._next = max(self._next, number + 1)
            ticket = self._out[number] = Ticket(number, worker, self.done, time.monotonic())
            return ticket

    def use(self, ticket: Ticket) -> bool:
        """Uses a ticket up; False if it is no longer out, and so must not count."""
        with self._changed:
            if self._out.get(ticket.number) != ticket:
                return False
            del self._out[ticket.number]
            self.done += 1
            self._changed.notify_all()
            return True

    def lost(self, worker: int) -> None:
        """Takes a worker's tickets back for others."""
        with self._changed:
            self._absent.add(worker)
            for number in [ticket.number for ticket in self._out.values() if ticket.worker == worker]:
                del self._out[number]
                heapq.heappush(self._returned, number)
            self._changed.notify_all()

    def overdue(self, seconds: float) -> set[int]:
        """Workers whose ticket has been out for longer than that."""
        with self._changed:
            since = time.monotonic() - seconds
            return {ticket.worker for ticket in self._out.values() if ticket.time < since}

    def missing(self, workers: range) -> list[int]:
        """Those whose tickets are out."""
        with self._changed:
            return [worker for worker in workers if self._busy(worker)]

    def wait(self, done: int, seconds: float) -> bool:
        """Whether so many were used up, after at most that time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self.done >= done, seconds)

    def pause(self, seconds: float) -> bool:
        """Hands out nothing more before the next `run_to`; whether none is out, after at most that time."""
        with self._changed:
            self._target = 0
            return self._changed.wait_for(lambda: not self._out, seconds)

    def _change(self, change) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    def _busy(self, worker: int) -> bool:
        return any(ticket.worker == worker for ticket in self._out.values())

    def _may_begin(self, worker: int) -> bool:
        number = self._returned[0] if self._returned else self._next
        return number < self._target and self._in_bounds(worker) and self._is_turn_of(worker, number)

    def _in_bounds(self, worker: int) -> bool:
        if self._bound is None:
            return True
        own_and_later = collections.Counter()
        # In the order they were handed out, the last one first.
        for ticket in reversed(self._out.values()):
            own_and_later[ticket.worker] += 1
            before = len(self._out) - own_and_later[ticket.worker] + (ticket.worker != worker)
            if self.done - ticket.done + before > self._bound:
                return False
        return len(self._out) <= self._bound

    def _is_turn_of(self, worker: int, number: int) -> bool:
        whose = number % self._num_workers
        return self._bound != 0 or whose == worker or whose in self._absent
