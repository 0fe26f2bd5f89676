"""What server 0 knows of the steps since it was last asked: sums for a report, staleness, who did how much."""

import collections
import dataclasses
import math
import threading
from collections.abc import Mapping


@dataclasses.dataclass
class WorkerTally:
    """One worker's part, since the beginning of the run.

    Attributes:
      steps: gradients of it that counted.
      failures: how often its connection broke before the end.
      busy_seconds, input_seconds: computing, and waiting for batches.
      staleness_sum, staleness_max: of its updates, where there is such a thing.
    """

    steps: int = 0
    failures: int = 0
    busy_seconds: float = 0.0
    input_seconds: float = 0.0
    staleness_sum: int = 0
    staleness_max: int = 0


class Tally:
    """Counts; every method may be called from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._workers: dict[str, WorkerTally] = collections.defaultdict(WorkerTally)
        self._totals = {"steps": 0, "examples": 0, "skipped": 0}
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._examples = self._steps = self._skipped = 0
        self._sums: dict[str, list[float]] = {}
        self._norm = float("nan")
        self._staleness: collections.Counter[int] = collections.Counter()

    def add_part(self, worker: str, told: Mapping, staleness: int | None = None) -> None:
        """A worker's gradient counts.

        Args:
          told: by the worker: 'examples', 'busy_seconds', 'input_seconds'.
          staleness: of the update it was; None where there is no such thing.
        """
        with self._lock:
            self._examples += told["examples"]
            self._totals["examples"] += told["examples"]
            own = self._workers[worker]
            own.steps += 1
            own.busy_seconds += told["busy_seconds"]
            own.input_seconds += told["input_seconds"]
            if staleness is not None:
                self._staleness[staleness] += 1
                own.staleness_sum += staleness
                own.staleness_max = max(own.staleness_max, staleness)

    def add_step(self, sums: Mapping[str, tuple[float, float]], norm: float, *, finite: bool) -> None:
        """A step is over.

        Args:
          sums: total and weight of the loss ('loss') and the metrics, over the step's examples.
          norm: of the mean gradient.
          finite: whether its update was applied.
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
        """A worker was lost."""
        with self._lock:
            self._workers[worker].failures += 1

    def totals(self) -> dict[str, int]:
        """'steps', 'examples' and 'skipped' since the beginning, taken or not."""
        with self._lock:
            return dict(self._totals)

    def take(self) -> dict:
        """Everything, for JSON; the sums begin anew."""
        with self._lock:
            taken = {
                "num_steps": self._steps,
                "examples": self._examples,
                "skipped": self._skipped,
                "sums": self._sums,
                # JSON has no such number.
                "norm": self._norm if math.isfinite(self._norm) else None,
                "staleness": sorted(self._staleness.items()),
                "workers": {name: dataclasses.asdict(own) for name, own in sorted(self._workers.items())},
            }
            self._begin_anew()
            return taken
