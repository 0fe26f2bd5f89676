"""The asynchronous updates that server 0 has decided on: a step is applied on all servers, or on none.

    worker:   stage(lease) at ps:1, ps:2, ...    ->    finish(lease) at ps:0, which updates its piece and decides
    pull:     ps:1 and ps:2 get the decisions; they apply what they have staged of them, and then answer

All servers apply the updates in the order of the decisions. What a worker staged before it died is dropped.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decisions:
    """Decisions as a server gets them, as JSON.

    Attributes:
      first: number of the first of these decisions; they are counted from the start of server 0.
      leases: the tickets whose updates are to be applied, in order.
      rates: the learning rate of each.
      open_from: updates of earlier leases are already decided, or never will be.
    """

    first: int
    leases: Sequence[int]
    rates: Sequence[float]
    open_from: int

    @property
    def end(self) -> int:
        """Number of the decision after these."""
        return self.first + len(self.leases)


class DecisionLog:
    """Server 0's decisions that another server may not have applied. The caller holds a lock."""

    def __init__(self):
        self._first = 0
        self._decided: list[tuple[int, float]] = []

    def add(self, lease: int, rate: float) -> None:
        """Adds the decision to apply a ticket's update with this learning rate."""
        self._decided.append((lease, rate))

    def settled(self, end: int) -> None:
        """Forgets the decisions before `end`: all servers have applied them."""
        count = max(0, end - self._first)
        self._first += len(self._decided[:count])
        self._decided = self._decided[count:]

    def restart(self) -> None:
        """Forgets all decisions: the chief has set the values of all servers."""
        self.settled(self._first + len(self._decided))

    def decisions(self, open_from: int) -> Decisions:
        """The decisions that are not settled."""
        leases, rates = tuple(lease for lease, _ in self._decided), tuple(rate for _, rate in self._decided)
        return Decisions(first=self._first, leases=leases, rates=rates, open_from=open_from)
