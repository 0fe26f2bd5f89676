"""How a group of parameter servers works: options that are the same in all its processes."""

import dataclasses

from strategies.engines import OWN, EngineChoice, choose_engine
from strategies.wire_precisions import WIRE_PRECISIONS
from towers.errors import UserError
from towers.updates.sparse_updates import DENSE, SPARSE_UPDATES

ASYNC, SYNC = "async", "sync"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServersOptions:
    """Attributes:
    engine: one of `strategies.engines.ENGINES`.
    staleness: 'async': no worker waits. 'sync': the gradients of a step are averaged and applied once. A number B:
      asynchronous, but at most B other updates are applied between an update's pull and its push.
    backup_workers: with 'sync', number of workers whose gradients a step does not wait for (Chen et al. 2016).
    staleness_aware: whether an update's learning rate is divided by its staleness (Zhang et al. 2016).
    prefetch: whether a worker pulls the next step's parameters while it computes the current step. It then does
      not wait for the network, but each update's staleness grows by one, by the worker's own update.
    wire_precision: precision in which gradients are pushed; parameters are pulled in their own precision.
    sparse_updates: 'dense': exact updates of embedding tables; 'lazy': updates only the rows that a batch names.
    steps_per_closure: with TensorFlow's engine, number of steps that a worker computes per call from the chief; 0
      chooses it by the time of a step.
    worker_timeout_seconds: with 'sync' or TensorFlow's engine, seconds without a worker's gradient before another
      worker computes its step or part of it; otherwise the seconds that a worker may be away before the next
      worker computes its batches too.
    timeout_seconds: seconds that a process may be silent before it counts as lost.

    Raises:
      UserError: an option is unknown or out of range, or does not fit `staleness` or the engine.
    """

    engine: str = "auto"
    staleness: str = ASYNC
    backup_workers: int = 0
    staleness_aware: bool = False
    prefetch: bool = False
    wire_precision: str = "float32"
    sparse_updates: str = DENSE
    steps_per_closure: int = 0
    worker_timeout_seconds: float = 60.0
    timeout_seconds: float = 600.0

    def __post_init__(self):
        if self.staleness not in (ASYNC, SYNC) and not self.staleness.isdecimal():
            raise UserError(
                f"staleness={self.staleness!r} is unknown: use async, sync or an integer of at least 0"
            )
        if self.backup_workers < 0:
            raise UserError(f"backup_workers={self.backup_workers}: it must be at least 0; omit it for no backups")
        if self.backup_workers and not self.is_sync:
            raise UserError(
                f"backup_workers={self.backup_workers} with staleness={self.staleness}: only synchronous steps "
                "wait for workers; use staleness=sync or omit backup_workers"
            )
        if self.staleness_aware and (self.is_sync or self.is_serial):
            raise UserError(
                f"staleness_aware with staleness={self.staleness}: no update is stale; omit staleness_aware"
            )
        if self.prefetch and (self.is_sync or self.is_serial):
            raise UserError(
                f"prefetch_parameters with staleness={self.staleness}: the next step's parameters are the result "
                "of this step, so they can't be pulled before it; omit prefetch_parameters"
            )
        if self.wire_precision not in WIRE_PRECISIONS:
            known = ", ".join(WIRE_PRECISIONS)
            raise UserError(f"wire_precision={self.wire_precision!r} is unknown: use one of {known}")
        if self.sparse_updates not in SPARSE_UPDATES:
            known = ", ".join(SPARSE_UPDATES)
            raise UserError(f"sparse_updates={self.sparse_updates!r} is unknown: use one of {known}")
        if not self.worker_timeout_seconds > 0:
            raise UserError(f"worker_timeout_seconds={self.worker_timeout_seconds:g}: it must be above 0")
        if not self.timeout_seconds > 0:
            raise UserError(f"collective_timeout_seconds={self.timeout_seconds:g}: it must be above 0")

        if self.engine_choice().name == OWN and self.steps_per_closure:
            what = f"engine={OWN}" if self.engine == OWN else self._needs_own()[0]
            raise UserError(
                f"steps_per_closure={self.steps_per_closure} with {what}: only TensorFlow's engine sends workers "
                "closures; omit one of them"
            )

    def engine_choice(self) -> EngineChoice:
        """The engine that carries the group.

        Raises:
          UserError: TensorFlow's engine does not support an option.
        """
        return choose_engine(self.engine, self._needs_own(), "ParameterServerStrategy")

    def _needs_own(self) -> list[str]:
        """The options that only our own engine supports."""
        needs_own = {
            f"staleness={self.staleness}": self.staleness != ASYNC,
            f"backup_workers={self.backup_workers}": bool(self.backup_workers),
            "staleness_aware": self.staleness_aware,
            "prefetch_parameters": self.prefetch,
        }
        return [what for what, is_needed in needs_own.items() if is_needed]

    @property
    def is_sync(self) -> bool:
        return self.staleness == SYNC

    @property
    def bound(self) -> int | None:
        """Largest staleness of an update; None for no bound."""
        return int(self.staleness) if self.staleness.isdecimal() else None

    def has_stale_gradients(self, num_workers: int) -> bool:
        """Whether parameters may have changed between a gradient's computation and its update."""
        return not (self.is_sync or self.is_serial) and (num_workers > 1 or self.prefetch)

    @property
    def is_serial(self) -> bool:
        """Whether workers take turns, each from the previous update, so that results equal one device's."""
        return self.bound == 0
