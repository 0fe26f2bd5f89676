"""Asynchronous updates that servers other than server 0 hold until server 0 has decided on them."""

import threading
from collections.abc import Callable

from strategies.servers.own.steps.decisions import Decisions
from strategies.servers.own.steps.piece_gradient import PieceGradient
from strategies.servers.wire import Refused


class StagedUpdates:
    """Staged gradients by their leases. Every method may be called from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._staged: dict[int, PieceGradient] = {}
        self._end: int | None = None
        self._open_from = 0

    def stage(self, lease: int, gradient: PieceGradient) -> None:
        """Holds a gradient, unless its lease is over because its worker counts as lost."""
        with self._lock:
            if lease >= self._open_from:
                self._staged[lease] = gradient

    def settle(self, decisions: Decisions, apply: Callable[[PieceGradient, float], object]) -> None:
        """Applies decided updates that are not applied yet, in order, and drops those that will never be applied.

        Args:
          decisions: server 0's decisions.
          apply: applies an update, given its gradient and learning rate.

        Raises:
          Refused: decisions or updates are missing, or `apply` raised it. Earlier updates are applied.
        """
        with self._lock:
            if self._end is None:
                self._end = decisions.first
            if decisions.first > self._end:
                raise Refused(f"decision {self._end} is missing: the next one known is {decisions.first}")
            decided = zip(decisions.leases, decisions.rates, strict=True)
            for lease, rate in list(decided)[self._end - decisions.first :]:
                if lease not in self._staged:
                    raise Refused(f"the update of lease {lease} was decided, and never arrived here")
                apply(self._staged[lease], rate)
                del self._staged[lease]
                self._end += 1
            self._open_from = max(self._open_from, decisions.open_from)
            for lease in [lease for lease in self._staged if lease < self._open_from]:
                del self._staged[lease]
