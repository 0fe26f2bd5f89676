"""How a group of parameter servers works: what its processes must agree on."""

import dataclasses

from strategies.wire_precisions import WIRE_PRECISIONS
from towers.errors import UserError

ASYNC, SYNC = "async", "sync"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServersOptions:
    """Attributes:
    staleness: 'async': no worker waits; 'sync': all gradients of a step are averaged and applied once; a number:
      asynchronous, but no update is applied after more than so many others since its parameters were pulled.
    backup_workers: of 'sync', workers whose gradients a step need not wait for (Chen et al. 2016).
    staleness_aware: divide an update's rate by its staleness (Zhang et al. 2016).
    prefetch: a worker pulls the next step's parameters while it computes this one: it never waits for the network,
      and every update is staler by one, the worker's own.
    wire_precision: what gradients are pushed in; parameters are pulled whole.
    timeout_seconds: how long a process may be silent before it counts as lost.
    """

    staleness: str = ASYNC
    backup_workers: int = 0
    staleness_aware: bool = False
    prefetch: bool = False
    wire_precision: str = "float32"
    timeout_seconds: float = 600.0

    def __post_init__(self):
        if self.staleness not in (ASYNC, SYNC) and not self.staleness.isdecimal():
            raise UserError(f"staleness={self.staleness!r} is unknown: use async, sync or a number from 0 on")
        if self.backup_workers < 0 or (self.backup_workers and not self.is_sync):
            raise UserError(
                f"backup_workers={self.backup_workers} with staleness={self.staleness}: it is a number from 0 on, "
                "and of staleness=sync alone, the others wait for nobody"
            )
        if self.staleness_aware and self.is_sync:
            raise UserError("staleness_aware with staleness=sync: nothing is stale there; leave it out")
        if self.prefetch and (self.is_sync or self.is_serial):
            raise UserError(
                f"prefetch_parameters with staleness={self.staleness}: there the next parameters are what this "
                "step makes; leave it out"
            )
        if self.wire_precision not in WIRE_PRECISIONS:
            known = ", ".join(WIRE_PRECISIONS)
            raise UserError(f"wire_precision={self.wire_precision!r} is unknown: use one of {known}")
        if not self.timeout_seconds > 0:
            raise UserError(f"collective_timeout_seconds={self.timeout_seconds:g}: give a number above 0")

    @property
    def is_sync(self) -> bool:
        return self.staleness == SYNC

    @property
    def bound(self) -> int | None:
        """The largest staleness an update may have; None for any."""
        return int(self.staleness) if self.staleness.isdecimal() else None

    @property
    def is_serial(self) -> bool:
        """Whether each update is computed from the one before: one device's numbers, by turns."""
        return self.bound == 0
