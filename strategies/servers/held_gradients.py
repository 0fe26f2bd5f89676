"""Gradients of synchronous steps, which a server holds until a step's gradients are complete."""

import threading
from collections.abc import Sequence

import numpy as np

from strategies.servers.piece_gradient import PieceGradient
from strategies.servers.wire import Refused


class HeldGradients:
    """This server's pieces of the gradients, by step and worker."""

    def __init__(self):
        self._lock = threading.Lock()
        self._held: dict[int, dict[int, PieceGradient]] = {}

    def hold(self, step: int, worker: int, gradient: PieceGradient) -> None:
        """Holds a worker's gradient SUM; it replaces an earlier one of the same step and worker."""
        with self._lock:
            self._held.setdefault(step, {})[worker] = gradient

    def total(self, step: int, workers: Sequence[int]) -> PieceGradient:
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
            found = [of_step[worker] for worker in workers]
        return PieceGradient.total(found)

    def mean(self, step: int, workers: Sequence[int], weight: float) -> PieceGradient:
        """The sum of these workers' gradients, divided by `weight`; zeros for weight 0.

        The division is in the gradients' own dtype and by the weight itself: multiplying by 1 / weight would
        round twice.

        Raises:
          Refused: as `total`.
        """
        mean = (lambda total: total / total.dtype.type(weight)) if weight else np.zeros_like
        return self.total(step, workers).map(mean)

    def drop(self, step: int) -> None:
        """Drops the gradients of this step and of all earlier ones."""
        with self._lock:
            self._held = {later: held for later, held in self._held.items() if later > step}
