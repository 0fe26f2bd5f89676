"""Gradients of synchronous steps, which a server holds until a step's gradients are complete."""

import threading
from collections.abc import Sequence

import numpy as np

from strategies.servers.own.steps.piece_gradient import PieceGradient
from strategies.servers.wire import Refused


class HeldGradients:
    """This server's pieces of the gradients, by step and by the lease (`servers.rounds`) of the gradient."""

    def __init__(self):
        self._lock = threading.Lock()
        self._held: dict[int, dict[int, PieceGradient]] = {}

    def hold(self, step: int, lease: int, gradient: PieceGradient) -> None:
        """Holds the gradient SUM of a lease; replaces an earlier one of the same lease."""
        with self._lock:
            self._held.setdefault(step, {})[lease] = gradient

    def total(self, step: int, leases: Sequence[int]) -> PieceGradient:
        """The sum of these leases' gradients, in the given order: its bits don't depend on arrival times.

        Raises:
          Refused: a lease's gradient is missing.
        """
        with self._lock:
            of_step = self._held.get(step, {})
            if not set(leases) <= set(of_step):
                raise Refused(
                    f"step {step}: the sum needs the gradients of leases {list(leases)}; "
                    f"this server holds those of leases {sorted(of_step)}"
                )
            found = [of_step[lease] for lease in leases]
        return PieceGradient.total(found)

    def mean(self, step: int, leases: Sequence[int], weight: float) -> PieceGradient:
        """The sum of these leases' gradients, divided by `weight`; zeros for weight 0.

        The division is in the gradients' own dtype and by the weight itself: multiplying by 1 / weight would
        round twice.

        Raises:
          Refused: as `total`.
        """
        mean = (lambda total: total / total.dtype.type(weight)) if weight else np.zeros_like
        return self.total(step, leases).map(mean)

    def drop(self, step: int) -> None:
        """Drops the gradients of this step and of all earlier ones."""
        with self._lock:
            self._held = {later: held for later, held in self._held.items() if later > step}
