"""Gradients of synchronous steps, which a server holds until a step's gradients are complete."""

import threading
from collections.abc import Sequence

import numpy as np

from strategies.servers.wire import Refused


class HeldGradients:
    """This server's pieces of the gradients, by step and worker."""

    def __init__(self):
        self._lock = threading.Lock()
        self._held: dict[int, dict[int, np.ndarray]] = {}

    def hold(self, step: int, worker: int, gradient: np.ndarray) -> None:
        """Holds a worker's gradient SUM, [n]; it replaces an earlier one of the same step and worker."""
        with self._lock:
            self._held.setdefault(step, {})[worker] = gradient

    def total(self, step: int, workers: Sequence[int]) -> np.ndarray:
        """The sum of these workers' gradients, added in the given order: the bits do not depend on the arrival.

        Raises:
          Refused: a worker's gradient is not here.
        """
        with self._lock:
            of_step = self._held.get(step, {})
            if not set(workers) <= set(of_step):
                raise Refused(
                    f"step {step}: the sum needs the gradients of workers {list(workers)}; "
                    f"this server holds those of workers {sorted(of_step)}"
                )
            total = of_step[workers[0]].copy()
            for worker in workers[1:]:
                total += of_step[worker]
            return total

    def mean(self, step: int, workers: Sequence[int], weight: float) -> np.ndarray:
        """The sum of these workers' gradients, divided by `weight`; zeros for weight 0.

        The division is in the gradients' own dtype and by the weight itself: multiplying by 1 / weight would
        round twice.

        Raises:
          Refused: as `total`.
        """
        total = self.total(step, workers)
        return total / total.dtype.type(weight) if weight else np.zeros_like(total)

    def drop(self, step: int) -> None:
        """Drops the gradients of this step and of all earlier ones."""
        with self._lock:
            self._held = {later: held for later, held in self._held.items() if later > step}
