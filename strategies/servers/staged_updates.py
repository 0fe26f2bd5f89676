"""Asynchronous updates that another server than 0 holds until server 0 has decided on them."""

import dataclasses
import threading
from collections.abc import Callable

from strategies.servers.decisions import Decisions
from strategies.servers.piece_gradient import PieceGradient
from strategies.servers.wire import Refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedUpdate:
    """One update of this server's piece.

    Attributes:
      gradient: the gradient.
      rate: learning rate.
      since: version that the gradient was computed from.
      aware: whether the rate is divided by the staleness.
    """

    gradient: PieceGradient
    rate: float
    since: int
    aware: bool


class StagedUpdates:
    """The updates by their leases. Every method may be called from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._staged: dict[int, StagedUpdate] = {}
        self._end: int | None = None
        self._open_from = 0

    def stage(self, lease: int, update: StagedUpdate) -> None:
        """Holds an update, unless its lease is over: its worker counts as lost."""
        with self._lock:
            if lease >= self._open_from:
                self._staged[lease] = update

    def settle(self, decisions: Decisions, apply: Callable[[StagedUpdate], None]) -> None:
        """Applies what was decided and not applied yet, in order, and drops what will never be.

        Raises:
          Refused: decisions or updates are missing; or as `apply`. The updates before it are applied.
        """
        with self._lock:
            if self._end is None:
                self._end = decisions.first
            if decisions.first > self._end:
                raise Refused(f"decision {self._end} is missing: the next one known is {decisions.first}")
            for lease in decisions.leases[self._end - decisions.first :]:
                if lease not in self._staged:
                    raise Refused(f"the update of lease {lease} was decided, and never arrived here")
                apply(self._staged[lease])
                del self._staged[lease]
                self._end += 1
            self._open_from = max(self._open_from, decisions.open_from)
            for lease in [lease for lease in self._staged if lease < self._open_from]:
                del self._staged[lease]
