"""Gradients of a step that a server holds until all that the step needs have come."""

import threading
from collections.abc import Sequence

import numpy as np

from strategies.servers.wire import Refused


class HeldGradients:
    """This server's pieces of gradients, by step and worker; a worker's second one replaces its first."""

    def __init__(self):
        self._lock = threading.Lock()
        self._held: dict[int, dict[int, np.ndarray]] = {}

    def hold(self, number: int, worker: int, gradient: np.ndarray) -> None:
        """Keeps a gradient SUM, [n]."""
        with self._lock:
            self._held.setdefault(number, {})[worker] = gradient

    def total(self, number: int, workers: Sequence[int]) -> np.ndarray:
        """The sum of these workers' gradients, in their order, so that it has the same bits every time.

        Raises:
          Refused: one of them is not here.
        """
        with self._lock:
            of_step = self._held.get(number, {})
            if not set(workers) <= set(of_step):
                raise Refused(
                    f"step {number}: gradients of {workers} are wanted, those of {list(of_step)} are here"
                )
            total = of_step[workers[0]].copy()
            for worker in workers[1:]:
                total += of_step[worker]
            return total

    def mean(self, number: int, workers: Sequence[int], weight: float) -> np.ndarray:
        """The sum of these workers' gradients, divided by `weight`; zeros for weight 0.

        The division is in the gradients' own dtype and by the weight itself: multiplying by 1 / weight would
        round twice.

        Raises:
          Refused: as `total`.
        """
        total = self.total(number, workers)
        return total / total.dtype.type(weight) if weight else np.zeros_like(total)

    def drop(self, number: int) -> None:
        """Forgets a step and those before it."""
        with self._lock:
            self._held = {step: held for step, held in self._held.items() if step > number}
