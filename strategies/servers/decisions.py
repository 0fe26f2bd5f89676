"""The asynchronous updates that server 0 has decided on: a step is on all servers, or on none.

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
      open_from: the updates of earlier leases were decided or will never be.
    """

    first: int
    leases: Sequence[int]
    open_from: int

    @property
    def end(self) -> int:
        """Number of the decision after these."""
        return self.first + len(self.leases)


class DecisionLog:
    """Server 0's decisions that another server may not have applied. The caller holds a lock."""

    def __init__(self):
        self._first = 0
        self._leases: list[int] = []

    def add(self, lease: int) -> None:
        """Decides that a ticket's update is applied."""
        self._leases.append(lease)

    def settled(self, end: int) -> None:
        """Forgets the decisions before `end`: all servers have applied them."""
        count = max(0, end - self._first)
        self._first += len(self._leases[:count])
        self._leases = self._leases[count:]

    def restart(self) -> None:
        """Forgets all decisions: the chief has set the values of all servers."""
        self.settled(self._first + len(self._leases))

    def decisions(self, open_from: int) -> Decisions:
        """The decisions that are not settled."""
        return Decisions(first=self._first, leases=tuple(self._leases), open_from=open_from)
