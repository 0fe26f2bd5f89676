"""The chief's side of the strategy 'ps': parameters are on servers, and workers pull and push.

The chief decides up to which step the workers may compute, and waits. Its own towers evaluate. Checkpoints read
and write its variables, which `collect` updates from the servers (`chief_copy.py`). Its reports are in
`chief_reports.py`.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from strategies.contract import Move, StepReport
from strategies.engines import OWN
from strategies.errors import NonFiniteStep, PeerLost
from strategies.pieces import Piece
from strategies.servers.carrier import Carrier
from strategies.servers.checks import check_model
from strategies.servers.chief_copy import ChiefCopy, chief_placement
from strategies.servers.chief_reports import ChiefReports
from strategies.servers.options import ServersOptions
from strategies.servers.server_memory import check_memory, variable_bytes
from strategies.servers.worker_graph import layout_of
from strategies.synchronous import SynchronousStrategy
from towers.devices import Devices
from towers.input.tower_parts import TowerParts
from towers.lookups import Lookups
from towers.one_process_engine import OneProcessEngine
from towers.options import StepOptions
from towers.parameters.placement import CentralPlacement
from towers.task import Task
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule
from towers.updates.sparse_updates import LAZY, only_rows

log = logging.getLogger(__name__)

_STALE = (
    "workers compute gradients from parameters that others change meanwhile, so training may diverge at a rate "
    "that suits one device: if the loss grows, use a lower rate, clip_global_norm=1 or staleness='sync'"
)


class ServersStrategy(SynchronousStrategy):
    """The chief's side.

    Attributes:
      lookups: the tables that workers pull by rows.
      layout: where each parameter is on the servers.
      engine_choice: the engine whose servers carry the run.
    """

    def __init__(
        self,
        task: Task,
        devices: Devices,
        options: StepOptions,
        shares,
        *,
        make_carrier: Callable[["ServersStrategy"], Carrier],
        servers: ServersOptions,
        num_workers: int,
        num_servers: int,
        startup_timeout_seconds: float,
    ):
        """Args:
        task, devices, options, shares: as for `strategies.towers.towers_strategy`.
        make_carrier: function of this strategy that returns the engine's servers and workers.
        servers: how the group works.
        num_workers, num_servers: number of workers and of servers in the cluster.
        startup_timeout_seconds: seconds to wait for the workers to connect.

        Raises:
          UserError: servers do not support an option or the model.
        """

        def place(variables: ModelVariables, rule: UpdateRule) -> CentralPlacement:
            return chief_placement(devices.parameters, variables, rule, lambda: self._carrier)

        def make_engine(model, batch_spec):
            parts = TowerParts.of_one_process(devices.num_towers, shares)
            named = {"batch_spec": batch_spec, "parts": parts, "place": place}
            return OneProcessEngine(task, model, devices, options, **named)

        self._servers, self._num_workers = servers, num_workers
        self.engine_choice = servers.engine_choice()
        self._startup_timeout_seconds = startup_timeout_seconds
        self._workers_per_batch = num_workers if servers.is_sync else 1
        super().__init__("ps", task, options, make_engine, devices.num_towers * self._workers_per_batch)
        self.lookups = Lookups(self.model, self.batch_spec)
        self.layout = layout_of(self.engine.tower.variables, self.lookups, options.rule, num_servers=num_servers)
        check_model(self, servers, num_workers)
        self._stop_asked = self._all_connected = self._finished = False
        self._stop_requested: Callable[[], bool] = lambda: False
        self._positions: Sequence[int] | None = None
        self._absent: list[int] = []
        self._copy = ChiefCopy(self.engine, options, devices.parameters)
        self._reports = ChiefReports(self.engine.counters, options.rate)
        self._reported_at: float | None = None
        self._warned_at: int | None = None
        self._seconds_before_pause = 0.0
        self._carrier = make_carrier(self)
        copies = 1 + len(options.rule.slot_names)
        parameters = sum(variable_bytes(variable) for variable in self.engine.parameters().values())
        check_memory(copies * parameters // num_servers, self._carrier.free_bytes())
        self._give_all()

    @property
    def batch_spec(self):
        """The spec of a batch, dimension 0 open."""
        return self._batches.spec

    @property
    def notices(self) -> list[str]:
        own = self.engine_choice.name == OWN
        carrier = "parameter servers of this project" if own else "ParameterServerStrategy"
        notices = [self.engine_choice.notice(carrier), *self._notices_of_tables(), *super().notices]
        return [*notices, _STALE] if self._servers.has_stale_gradients(self._num_workers) else notices

    def _notices_of_tables(self) -> list[str]:
        lazily = self._servers.sparse_updates == LAZY
        if not (tables := self.layout.tables):
            why = "the model has no embedding table whose rows workers pull"
            return [f"sparse_updates={LAZY} changes nothing: {why}"] if lazily else []
        rows = sum(table.height for table in tables)
        count = self.layout.num_tables
        named = "1 embedding table" if count == 1 else f"{count} embedding tables"
        if only_rows(self.options.rule):
            how = "updates change only those rows"
        elif lazily:
            how = "lazy updates change only those rows (sparse_updates=dense gives the exact numbers)"
        else:
            how = "each update takes time for whole tables (sparse_updates=lazy: only for those rows, not exact)"
        return [f"{named} with {rows:,} rows: workers pull and push the rows of their batches; {how}"]

    def mode_settings(self) -> dict[str, object]:
        return {"num_workers": self._num_workers, "servers": self._servers}

    @property
    def is_exact(self) -> bool:
        if self.layout.tables and self._servers.sparse_updates == LAZY and not only_rows(self.options.rule):
            return False
        return not (self._servers.has_stale_gradients(self._num_workers) or self._servers.backup_workers)

    @property
    def shares_by_worker(self) -> tuple[tuple[float, ...], ...]:
        shares = self.engine.parts.shares
        return (tuple(share / sum(shares) for share in shares),) * self._workers_per_batch

    def agree(self, move: Move) -> Move:
        """The chief decides; it also stops if another process was asked to stop."""
        self._until, self._stop_requested = move.until, move.stop_requested
        return dataclasses.replace(move, stop=move.stop or self._stop_asked)

    _reports_late = False

    def run_steps(self, num_steps: int) -> StepReport:
        # Unless they were paused, the workers have computed since the last report.
        began = self._reported_at or time.perf_counter()
        bad_step = self._run_to(self.step + num_steps)
        figures = self._carrier.report()
        self._reported_at = time.perf_counter()
        self._stop_asked = figures["stop_asked"]
        self._reports.count(figures["done"], figures["totals"])
        report = self._reports.report(
            figures,
            seconds=self._reported_at - began + self._seconds_before_pause,
            absent=_names(self._absent),
            servers=self._carrier.server_figures(),
        )
        self._seconds_before_pause = 0.0
        if bad_step is not None:
            raise NonFiniteStep(
                f"step {bad_step} is not finite and was not applied: lower the learning rate, clip the gradients, "
                "clean the data, or skip such steps with on_nan=skip",
                step=bad_step,
            )
        return report

    def _run_to(self, wanted: int) -> int | None:
        """Waits until `wanted` steps are done or a step was not finite; returns the latter step, or None.

        It stops waiting if this process was asked to stop and no worker is left: all may have ended with a user's
        error.

        Raises:
          PeerLost: no step was done within the timeout; the message names the missing workers.
        """
        last_change, before = time.monotonic(), self.step
        while True:
            progress = self._carrier.advance(wanted, max(wanted, self._until))
            self._absent = progress.absent
            self._all_connected = self._all_connected or not self._absent
            if progress.done >= wanted or progress.bad_step is not None:
                return progress.bad_step
            if len(progress.absent) == self._num_workers and self._stop_requested():
                return None
            if progress.done != before:
                last_change, before = time.monotonic(), progress.done
            limit = self._patience_seconds if self._all_connected else self._startup_timeout_seconds
            waited = time.monotonic() - last_change
            self._warn_of_waiting(waited, limit, progress.missing)
            if waited > limit:
                missing = progress.absent or progress.missing or range(self._num_workers)
                late = "did not answer" if self._all_connected else "did not connect"
                raise PeerLost(f"{_named(missing)} {late} within {limit:g} seconds at step {before}: restart it")

    def _warn_of_waiting(self, waited: float, limit: float, missing: Sequence[int]) -> None:
        """Warns, once for each step, which workers the run waits for after the time that a worker may take."""
        if missing and waited > self._servers.worker_timeout_seconds and self._warned_at != self.step:
            self._warned_at = self.step
            log.warning(
                "no step was done for %.3g seconds: waiting for %s, at most %g seconds in total",
                *(waited, _named(missing), limit),
            )

    @property
    def _patience_seconds(self) -> float:
        """Seconds to wait for the next step to be done.

        Asynchronous: one timeout until a silent worker counts as lost, plus one for the worker that then computes
          the step.
        """
        return self._servers.timeout_seconds * (1 if self._servers.is_sync else 2)

    def _pause(self) -> None:
        """Waits until no worker computes: all servers then hold the values after the same steps."""
        since = time.monotonic()
        while not (paused := self._carrier.pause()).idle:
            waited = time.monotonic() - since
            self._warn_of_waiting(waited, self._patience_seconds, paused.missing)
            if waited > self._patience_seconds:
                missing = _named(paused.missing)
                raise PeerLost(f"{missing} did not answer within {self._patience_seconds:g} seconds: restart it")
        if self._reported_at is not None:
            self._seconds_before_pause += time.perf_counter() - self._reported_at
        self._reported_at = None
        self._positions = paused.positions
        self._reports.count(paused.done, paused.totals)

    def evaluate(self, num_batches: int | None = None, **named) -> dict[str, float] | None:
        self.collect()
        return super().evaluate(num_batches, **named)

    def portable_model(self):
        self.collect()
        return super().portable_model()

    def restored(self, positions: Sequence[int] | None = None) -> None:
        super().restored()
        self._positions = positions
        self._give_all()

    @property
    def batch_positions(self) -> Sequence[int] | None:
        return self._positions

    def finish(self, completed: bool) -> None:
        self.collect()
        self._finished = True
        self._carrier.end("done" if completed else "interrupted")

    def graph(self) -> None:
        """Returns None: the chief's own towers do not train."""

    def _give_all(self) -> None:
        """Sends this process's values to the servers; the workers begin at its step."""
        self._until = self.step
        self._reports.restart()
        self._reported_at, self._seconds_before_pause = None, 0.0
        self._carrier.start(self._copy.start(self.layout.vector.shapes, self._positions))

    def collect(self) -> None:
        """Pauses the workers and copies the servers' parameters and state into this process's variables."""
        if self._finished:
            return
        self._pause()
        self._copy.bring(self._carrier)

    def begin_saving(self) -> None:
        self.collect()

    def values(self, pieces: Sequence[Piece]) -> Iterator[tf.Tensor | np.ndarray]:
        return map(self._copy.value, pieces)

    def restore(self, part: Piece, read: Callable[[Piece], tf.Tensor]) -> None:
        self._copy.restore(part, read)


def _named(workers) -> str:
    return ", ".join(_names(workers))


def _names(workers) -> list[str]:
    return [f"worker:{worker}" for worker in workers]
