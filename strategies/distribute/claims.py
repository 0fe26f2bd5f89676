"""The table of steps in the process of server 0: which steps were claimed, applied and counted.

TensorFlow may run a step of the chief more than once, even on two workers. So a step's number is claimed before
its update and counted after it. A second claim of a number is refused, so that no update is applied twice.

    worker:  pull  ->  compute  ->  claim(number)  ->  update of all servers  ->  count(number)
"""

import collections
import logging
import threading
import time
from collections.abc import Mapping, Sequence

from strategies.servers.batch_order import BatchOrder
from strategies.servers.one_chief import refusal_of_second
from strategies.servers.tally import Tally
from towers.errors import UserError

log = logging.getLogger(__name__)


class Claims:
    """The table. Every method may be called from any thread; all but `begin` act on the current run."""

    def __init__(self):
        self._lock = threading.Lock()
        self._run = self._chief = ""
        self._next = self._updates = self._pulls = self._pushes = self._starts = 0
        self._row_elements: collections.Counter[int] = collections.Counter()
        # The staleness of each claimed step's update, by its number; None if it was not finite.
        self._claimed: dict[int, int | None] = {}
        self._counted: set[int] = set()
        # Claimed steps that were tried again and are not yet counted.
        self._retried: set[int] = set()
        self._tally, self._batches = Tally(), BatchOrder(0, 1)
        self._reported: Sequence[str] = ()
        self._stops_if_bad, self._bad_step, self._stop_asked = False, None, False

    def begin(
        self,
        run: str,
        chief: str,
        first: int,
        updates: int,
        reported: Sequence[str],
        stops_if_bad: bool,
        *,
        num_workers: int = 1,
        positions: Sequence[int] | None = None,
    ) -> None:
        """Begins at step `first`; the claims of other runs are refused.

        Args:
          run: the run's epoch, different for each start of a chief.
          chief: identifies the chief's process.
          first: number of the first step.
          updates: number of updates before it.
          reported: names of the (total, weight) pairs that each step reports, 'loss' first.
          stops_if_bad: whether no step is applied after one that was not finite.
          num_workers, positions: as for `BatchOrder`.

        Raises:
          UserError: another run has begun.
        """
        with self._lock:
            if self._run not in ("", run):
                raise UserError(refusal_of_second("ps:0", self._chief))
            self._chief = chief
            self._run, self._next, self._updates = run, first, updates
            self._starts += 1
            self._claimed, self._counted, self._retried, self._tally = {}, set(), set(), Tally()
            self._pulls = self._pushes = 0
            self._row_elements = collections.Counter()
            self._batches = BatchOrder(first, num_workers, positions)
            self._started: dict[str, float] = {}
            self._counted_at: dict[str, float] = {}
            self._lost: set[str] = set()
            self._reported, self._stops_if_bad, self._bad_step = tuple(reported), stops_if_bad, None

    def plan(self, first: int, count: int) -> list[int]:
        """The numbers that a worker needs to begin the steps first .. first + count - 1.

        Returns:
          The number of updates so far, from which staleness is counted; the number of the chief's starts, which
          identifies the frozen weights; the number of these steps that were already claimed; each worker's next
          batch.
        """
        with self._lock:
            numbers = range(first, first + count)
            claimed = sum(number < self._next or number in self._claimed for number in numbers)
            return [self._updates, self._starts, claimed, *self._batches.positions]

    def claim(self, run: str, number: int, since: int, finite: bool, worker: int = 0) -> tuple[bool, int]:
        """Whether to apply the update of step `number`: only on its first claim, and only if it is finite.

        Args:
          run: epoch of the step's run.
          number: the step.
          since: the number of updates at the step's pull.
          finite: whether its loss and gradients are finite.
          worker: index of the worker, whose batch it uses if this is its first claim.

        Returns:
          Whether to apply it, and the number of updates before it.
        """
        with self._lock:
            self._pulls += 1
            staleness, updates = self._updates - since, self._updates
            is_open = run == self._run and number >= self._next and self._bad_step is None
            if not is_open or number in self._claimed:
                self._note_retry(run, number)
                return False, updates
            self._claimed[number] = staleness if finite else None
            self._batches.take(worker)
            self._pushes += finite
            if not finite and self._stops_if_bad:
                self._bad_step = number
            self._updates += finite
            return finite, updates

    def _note_retry(self, run: str, number: int) -> None:
        """Records a retry of a step that was claimed, not counted: some servers may lack its update."""
        if run != self._run or number not in self._claimed or number in self._counted or number in self._retried:
            return
        self._retried.add(number)
        log.warning(
            "step %d: its worker was lost during its update, which some servers may miss; the step counts once",
            number,
        )

    def count(self, run: str, number: int, worker: str, figures: Mapping) -> int:
        """Counts step `number` after its update, once; returns the number of updates.

        Args:
          run, number: as for `claim`.
          worker: name of the worker.
          figures: 'started' (time at which the worker started), 'examples', 'busy_seconds', 'input_seconds',
            'norm', 'finite', 'stop_asked' and 'others': with tables, the elements of rows pulled from each server,
            then two numbers for each reported name.
        """
        with self._lock:
            self._stop_asked = self._stop_asked or figures["stop_asked"]
            if self._started.setdefault(worker, figures["started"]) != figures["started"]:
                self._started[worker] = figures["started"]
                # Unless the chief has already noticed the loss.
                if worker not in self._lost:
                    self._tally.add_failure(worker)
            self._counted_at[worker] = time.monotonic()
            self._lost.discard(worker)
            is_claimed = run == self._run and number in self._claimed
            if not is_claimed or number in self._counted:
                return self._updates
            self._counted.add(number)
            # The staleness of the claimed update: if its worker died, another worker counts the step.
            staleness = self._claimed[number]
            while self._next in self._counted:
                del self._claimed[self._next]
                self._counted.discard(self._next)
                self._next += 1
            self._tally.add_part(worker, figures, staleness, is_taken_over=number in self._retried)
            self._retried.discard(number)
            others = figures["others"]
            split = len(others) - 2 * len(self._reported)
            for server, elements in enumerate(others[:split]):
                self._row_elements[server] += int(elements)
            pairs = zip(others[split::2], others[split + 1 :: 2], strict=True)
            sums = dict(zip(self._reported, pairs, strict=True))
            self._tally.add_step(sums, figures["norm"], finite=figures["finite"])
            return self._updates

    @property
    def done(self) -> int:
        """Number of steps counted, including those of the runs that this one resumes."""
        return self._next + len(self._counted)

    def progress(self) -> dict:
        """The number of counted steps, the step that ended the run or None, and whether a worker must stop."""
        with self._lock:
            return {"done": self.done, "bad_step": self._bad_step, "stop_asked": self._stop_asked}

    def open_steps(self, end: int) -> dict:
        """'open': the steps before `end` that are not counted; 'quiet_seconds': of each worker that has counted a
        step, the seconds since its last one."""
        with self._lock:
            now = time.monotonic()
            return {
                "open": [step for step in range(self._next, end) if step not in self._counted],
                "quiet_seconds": {worker: now - at for worker, at in self._counted_at.items()},
            }

    def lost(self, workers: Sequence[str]) -> list[str]:
        """Records workers as lost until they count a step again; returns the newly lost ones."""
        with self._lock:
            found = [worker for worker in workers if worker not in self._lost]
            for worker in found:
                self._tally.add_failure(worker)
            self._lost.update(found)
            return found

    def totals(self) -> dict:
        """The figures since the beginning of the run, and each worker's next batch."""
        with self._lock:
            positions = list(self._batches.positions)
            return {"done": self.done, "totals": self._tally.totals(), "positions": positions}

    def report(self) -> dict:
        """The figures of the steps since the last report."""
        with self._lock:
            return {
                "done": self.done,
                "totals": self._tally.totals(),
                "stop_asked": self._stop_asked,
                "turned_away": 0,
                "pulls": self._pulls,
                "pushes": self._pushes,
                "row_elements": sorted(self._row_elements.items()),
                **self._tally.take(),
            }
