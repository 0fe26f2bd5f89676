"""Figures that server 0 collects for the chief's reports: sums, staleness and each worker's share."""

import collections
import dataclasses
import math
import threading
from collections.abc import Mapping


@dataclasses.dataclass
class WorkerTally:
    """One worker's figures since the beginning of the run.

    Attributes:
      steps: number of its gradients that were used.
      taken_over: number of those that it computed for a worker that was lost or late.
      failures: number of times it was lost, or so late that another worker computed its part.
      busy_seconds: seconds spent computing.
      input_seconds: seconds spent waiting for its batches.
      staleness_sum: sum of its updates' staleness; 0 with synchronous steps.
      staleness_max: largest staleness of its updates; 0 with synchronous steps.
    """

    steps: int = 0
    taken_over: int = 0
    failures: int = 0
    busy_seconds: float = 0.0
    input_seconds: float = 0.0
    staleness_sum: int = 0
    staleness_max: int = 0


class Tally:
    """The figures; every method may be called from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._workers: dict[str, WorkerTally] = collections.defaultdict(WorkerTally)
        self._totals = {"steps": 0, "examples": 0, "skipped": 0}
        self._reset()

    def _reset(self) -> None:
        self._examples = self._steps = self._skipped = 0
        self._sums: dict[str, list[float]] = {}
        self._norm = float("nan")
        self._staleness: collections.Counter[int] = collections.Counter()

    def add_part(
        self, worker: str, figures: Mapping, staleness: int | None = None, *, is_taken_over: bool = False
    ) -> None:
        """Counts a worker's gradient.

        Args:
          worker: name of the worker.
          figures: the worker's 'examples', 'busy_seconds' and 'input_seconds'.
          staleness: staleness of the update; None with synchronous steps, or if no update was applied.
          is_taken_over: whether it computed the gradient for another worker.
        """
        with self._lock:
            self._examples += figures["examples"]
            self._totals["examples"] += figures["examples"]
            own = self._workers[worker]
            own.steps += 1
            own.taken_over += is_taken_over
            own.busy_seconds += figures["busy_seconds"]
            own.input_seconds += figures["input_seconds"]
            if staleness is not None:
                self._staleness[staleness] += 1
                own.staleness_sum += staleness
                own.staleness_max = max(own.staleness_max, staleness)

    def add_step(self, sums: Mapping[str, tuple[float, float]], norm: float, *, finite: bool) -> None:
        """Counts a finished step.

        Args:
          sums: (total, weight) of 'loss' and of the metrics over the step's examples, by name.
          norm: norm of the mean gradient.
          finite: whether loss and gradients are finite, so that the update was applied.
        """
        with self._lock:
            self._steps += 1
            self._skipped += not finite
            self._totals["steps"] += 1
            self._totals["skipped"] += not finite
            self._norm = norm
            for name, pair in sums.items() if finite else ():
                self._sums[name] = [a + b for a, b in zip(self._sums.get(name, (0.0, 0.0)), pair, strict=True)]

    def add_failure(self, worker: str) -> None:
        """Counts the loss of a worker."""
        with self._lock:
            self._workers[worker].failures += 1

    def totals(self) -> dict[str, int]:
        """'steps', 'examples' and 'skipped' since the beginning of the run; `take` does not change them."""
        with self._lock:
            return dict(self._totals)

    def take(self) -> dict:
        """All figures, ready for JSON; the sums restart at zero."""
        with self._lock:
            taken = {
                "num_steps": self._steps,
                "examples": self._examples,
                "skipped": self._skipped,
                "sums": self._sums,
                # JSON has no NaN.
                "norm": self._norm if math.isfinite(self._norm) else None,
                "staleness": sorted(self._staleness.items()),
                "workers": {name: dataclasses.asdict(own) for name, own in sorted(self._workers.items())},
            }
            self._reset()
            return taken
