"""The strategy 'ps', as the chief sees it: parameters on servers, and workers that pull and push.

The chief decides how far the workers may go, waits, and reports. Its own towers evaluate. Checkpoints read and
write its variables, which `collect` brings up to date.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from strategies.contract import Move, StepReport
from strategies.engines import OWN
from strategies.errors import NonFiniteStep, PeerLost
from strategies.pieces import Piece
from strategies.servers.carrier import Carrier, Start
from strategies.servers.checks import check_model
from strategies.servers.options import ServersOptions
from strategies.servers.report_section import SECTION, SUMMED, ServersReport, WorkerFigures
from strategies.servers.server_memory import check_memory, variable_bytes
from strategies.servers.slot_on_servers import SlotOnServers, read_whole
from strategies.servers.worker_graph import layout_of
from strategies.step_report import mean_of
from strategies.synchronous import SynchronousStrategy
from towers.batch_stats import is_averaged
from towers.devices import Devices
from towers.lookups import Lookups
from towers.one_process_engine import OneProcessEngine
from towers.options import StepOptions
from towers.parameters.placement import CentralPlacement, constraints_of, variables_like
from towers.task import Task
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule
from towers.updates.sparse_updates import LAZY, only_rows


class ServersStrategy(SynchronousStrategy):
    """The chief's side.

    Attributes:
      lookups: the tables that workers pull by rows.
      layout: where each parameter is on the servers.
      engine_choice: whose servers carry the run.
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
          UserError: options or a model that servers can't support.
        """

        def make_engine(model, batch_spec):
            named = {"batch_spec": batch_spec, "shares": shares, "place": self._place}
            return OneProcessEngine(task, model, devices, options, **named)

        self._servers, self._num_workers, self._device = servers, num_workers, devices.parameters
        self.engine_choice = servers.engine_choice()
        self._startup_timeout_seconds = startup_timeout_seconds
        self._workers_per_batch = num_workers if servers.is_sync else 1
        super().__init__("ps", task, options, make_engine, devices.num_towers * self._workers_per_batch)
        self.lookups = Lookups(self.model, self.batch_spec)
        variables = self.engine.tower.variables
        self._templates = dict(zip(self.engine.parameters(), variables.parameters, strict=True))
        state = list(self.engine.state().values())
        self._frozen = [state[index] for index in variables.frozen]
        # What passes change: it comes and goes with each step.
        self._state = [state[index] for index in variables.moving]
        self.layout = layout_of(variables, self.lookups, options.rule, num_servers=num_servers)
        check_model(self, servers, num_workers)
        self._stop_asked = self._all_connected = self._finished = False
        self._stop_requested: Callable[[], bool] = lambda: False
        self._positions: Sequence[int] | None = None
        self._absent: list[int] = []
        self._workers: Mapping[str, Mapping] = {}
        self._reported_at: float | None = None
        self._seconds_before_pause = 0.0
        self._carrier = make_carrier(self)
        copies = 1 + len(options.rule.slot_names)
        parameters = sum(variable_bytes(variable) for variable in self.engine.parameters().values())
        check_memory(copies * parameters // num_servers, self._carrier.free_bytes())
        self._give_all()

    def _place(self, variables: ModelVariables, rule: UpdateRule) -> CentralPlacement:
        """The chief's copy of parameters and state, with which it evaluates. Servers alone have slots."""
        with tf.device(self._device):
            parameters, state = variables_like(variables.parameters), variables_like(variables.state)
        slots = {
            slot: {
                name: SlotOnServers(slot, name, variable, lambda: self._carrier)
                for name, variable in parameters.items()
            }
            for slot in rule.slot_names
        }
        return CentralPlacement(self._device, parameters, state, slots, constraints_of(variables))

    @property
    def batch_spec(self):
        """The spec of a batch, dimension 0 open."""
        return self._batches.spec

    @property
    def notices(self) -> list[str]:
        own = self.engine_choice.name == OWN
        carrier = "parameter servers of this project" if own else "ParameterServerStrategy"
        return [self.engine_choice.notice(carrier), *self._notices_of_tables(), *super().notices]

    def _notices_of_tables(self) -> list[str]:
        if not (tables := self.layout.tables):
            return []
        rows = sum(table.height for table in tables)
        count = self.layout.num_tables
        named = "1 embedding table" if count == 1 else f"{count} embedding tables"
        lazily = self._servers.sparse_updates == LAZY
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
        alone = self._num_workers == 1 and not self._servers.prefetch
        return alone or self._servers.is_serial or (self._servers.is_sync and not self._servers.backup_workers)

    @property
    def part_shares(self) -> tuple[float, ...]:
        return tuple(share / sum(self.engine.shares) for share in self.engine.shares) * self._workers_per_batch

    def agree(self, move: Move) -> Move:
        """The chief decides; it stops also when a worker was asked to stop."""
        self._until, self._stop_requested = move.until, move.stop_requested
        return dataclasses.replace(move, stop=move.stop or self._stop_asked)

    _reports_late = False

    def run_steps(self, num_steps: int) -> StepReport:
        # Unless something paused them, the workers have computed since the last report.
        began = self._reported_at or time.perf_counter()
        bad_step = self._run_to(self.step + num_steps)
        figures = self._carrier.report()
        self._reported_at = time.perf_counter()
        self._stop_asked = figures["stop_asked"]
        self._count(figures["done"], figures["totals"])
        report = self._report(figures, self._reported_at - began + self._seconds_before_pause)
        self._seconds_before_pause = 0.0
        if bad_step is not None:
            raise NonFiniteStep(
                f"step {bad_step} is not finite and was not applied: lower the learning rate, clip the gradients, "
                "clean the data, or skip such steps with on_nan=skip",
                step=bad_step,
            )
        return report

    def _run_to(self, wanted: int) -> int | None:
        """Waits until `wanted` steps are done or a step was not finite; that step, or None.

        It waits no longer if this process was asked to stop and no worker is left, all of which may have ended
        with an error of the user's.

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
            if time.monotonic() - last_change > limit:
                missing = progress.absent or progress.missing or range(self._num_workers)
                late = "did not answer" if self._all_connected else "did not connect"
                raise PeerLost(f"{_named(missing)} {late} within {limit:g} seconds at step {before}: restart it")

    @property
    def _patience_seconds(self) -> float:
        """Seconds to wait for the next step to be done.

        Asynchronous: one timeout until a silent worker counts as lost, and one more for the worker that then
        computes the step.
        """
        return self._servers.timeout_seconds * (1 if self._servers.is_sync else 2)

    def _report(self, figures: Mapping, seconds: float) -> StepReport:
        means = {name: mean_of(*pair) for name, pair in figures["sums"].items()}
        workers = [self._worker_figures(name, total) for name, total in figures["workers"].items()]
        self._workers = figures["workers"]
        return StepReport(
            step=figures["done"],
            num_steps=figures["num_steps"],
            examples=figures["examples"],
            loss=means.pop("loss", math.nan),
            metrics=means,
            learning_rate=self.options.schedule(figures["done"] - 1),
            gradient_norm=math.nan if figures["norm"] is None else figures["norm"],
            skipped=figures["skipped"],
            seconds=seconds,
            input_seconds=max((worker.input_seconds for worker in workers), default=0.0),
            sections={
                SECTION: ServersReport(
                    staleness={int(staleness): count for staleness, count in figures["staleness"]},
                    turned_away=figures["turned_away"],
                    absent=tuple(_names(self._absent)),
                    workers=tuple(workers),
                    servers=tuple(self._carrier.server_figures()),
                )
            },
        )

    def _worker_figures(self, name: str, total: Mapping) -> WorkerFigures:
        """A worker's figures since the last report; its failures and its maximum are since the run began."""
        before = self._workers.get(name, {})
        return WorkerFigures(name=name, **(total | {what: total[what] - before.get(what, 0) for what in SUMMED}))

    def _count(self, done: int, totals: Mapping[str, int]) -> None:
        """Sets the counters: the values given to the servers plus what was counted since then."""
        counters = self.engine.counters
        counters.step.assign(done)
        counters.examples.assign(self._given["examples"] + totals["examples"])
        counters.updates.assign(self._given["updates"] + totals["steps"] - totals["skipped"])
        counters.skipped.assign(self._given["skipped"] + totals["skipped"])

    def _pause(self) -> None:
        """Waits until no worker computes: all servers then hold the values after the same steps."""
        since = time.monotonic()
        while not (paused := self._carrier.pause()).idle:
            if time.monotonic() - since > self._patience_seconds:
                missing = _named(paused.missing)
                raise PeerLost(f"{missing} did not answer within {self._patience_seconds:g} seconds: restart it")
        if self._reported_at is not None:
            self._seconds_before_pause += time.perf_counter() - self._reported_at
        self._reported_at = None
        self._positions = paused.positions
        self._count(paused.done, paused.totals)

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
        """None: the chief's own towers do not train."""

    def _give_all(self) -> None:
        """Sends this process's values to the servers; the workers begin at its step."""
        engine, rule = self.engine, self.options.rule
        decays = [
            np.full(math.prod(shape), bool(rule.decays(name, tf.TensorShape(shape))))
            for name, shape in self.layout.vector.shapes.items()
        ]
        self._given = {name: int(value) for name, value in engine.counters.variables().items()}
        self._until = self.step
        # The servers count from here.
        self._workers, self._reported_at, self._seconds_before_pause = {}, None, 0.0
        averaged = [
            np.full(value.shape.num_elements(), is_averaged(value, self.options.batch_stats))
            for value in self._state
        ]
        self._carrier.start(
            Start(
                parameters=engine.parameters(),
                slot_names=rule.slot_names,
                state=self._state_vector(),
                decays=np.concatenate(decays) if decays else np.zeros(0, bool),
                averaged=np.concatenate(averaged) if averaged else np.zeros(0, bool),
                step=self.step,
                updates=self._given["updates"],
                positions=self._positions,
                state_dtypes=[(value.dtype.name, value.shape.num_elements()) for value in self._state],
                frozen=[variable.numpy() for variable in self._frozen],
            )
        )

    def _state_vector(self) -> np.ndarray:
        values = [variable.numpy() for variable in self._state]
        dtypes = {value.dtype for value in values}
        is_common = len(dtypes) == 1 and np.issubdtype(values[0].dtype, np.floating)
        dtype = values[0].dtype if is_common else np.float64
        return np.concatenate([np.ravel(value).astype(dtype) for value in values]) if values else np.zeros(0)

    def collect(self) -> None:
        """Pauses the workers and copies the servers' parameters and state into this process's variables."""
        if self._finished:
            return
        self._pause()
        for name, variable in self.engine.parameters().items():
            self._assign(name, read_whole(self._carrier, None, name, variable))
        values, begin = self._carrier.state(), 0
        for variable in self._state:
            end = begin + variable.shape.num_elements()
            variable.assign(tf.cast(values[begin:end].reshape(variable.shape), variable.dtype))
            begin = end

    def begin_saving(self) -> None:
        self.collect()

    def values(self, pieces: Sequence[Piece]) -> Iterator[tf.Tensor | np.ndarray]:
        for piece in pieces:
            variable = piece.variable
            yield variable.read(piece) if isinstance(variable, SlotOnServers) else piece.value()

    def restore(self, part: Piece, read: Callable[[Piece], tf.Tensor]) -> None:
        kind, *names = part.path
        if isinstance(part.variable, SlotOnServers):
            for piece in part.divided():
                part.variable.write(piece, read(piece))
        elif kind == "parameters" and isinstance(part.variable, tf.Variable):
            self._assign(names[0], read(part))
        else:
            super().restore(part, read)

    def _assign(self, name: str, value) -> None:
        """Sets a parameter, and the template's: with one value, of which the host's memory has one copy."""
        variable = self.engine.parameters()[name]
        variable.assign(value)
        if "CPU" in self._device:
            self._templates[name].assign(variable.read_value())


def _named(workers) -> str:
    return ", ".join(_names(workers))


def _names(workers) -> list[str]:
    return [f"worker:{worker}" for worker in workers]
