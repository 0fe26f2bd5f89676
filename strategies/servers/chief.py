"""The strategy 'ps': parameters on servers, workers that pull and push, and the chief, which this is of.

The chief says how far to go, waits, and reports. Its own towers evaluate, and its variables are what checkpoints
read and write: they are brought up to date when somebody looks.
"""

import dataclasses
import math
import time
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from strategies.contract import Move, StepReport
from strategies.errors import NonFiniteStep, PeerLost
from strategies.servers.coordination import KEY
from strategies.servers.figures import SECTION, ServerFigures, ServersReport, WorkerFigures
from strategies.servers.group import Group
from strategies.servers.layout import Layout
from strategies.servers.options import ServersOptions
from strategies.servers.store import check_rule
from strategies.synchronous import SynchronousStrategy, mean_of
from towers.devices import Devices
from towers.errors import UserError
from towers.layers.batch_norm import batch_norm_layers
from towers.options import StepOptions
from towers.task import Task
from towers.towers_engine import TowersEngine


def check_options(options: StepOptions, servers: ServersOptions, num_workers: int) -> None:
    """Raises UserError for what a group of servers can't do."""
    check_rule(options.rule)
    if options.precision == "float16":
        raise UserError("precision=float16 with strategy=ps: workers have no loss scale in common; use bfloat16")
    if servers.is_sync and options.clipping.norm is not None:
        raise UserError(
            "clip_norm with staleness=sync: no server has a whole parameter's mean gradient; use clip_global_norm"
        )
    if servers.backup_workers >= num_workers:
        raise UserError(
            f"backup_workers={servers.backup_workers} of {num_workers} workers: a step needs at least one "
            f"gradient; use at most {num_workers - 1}"
        )


class ServersStrategy(SynchronousStrategy):
    """The chief's side."""

    def __init__(
        self,
        task: Task,
        devices: Devices,
        options: StepOptions,
        shares,
        *,
        group: Group,
        servers: ServersOptions,
        num_workers: int,
        startup_timeout_seconds: float,
    ):
        """Args:
        group: connections to the servers.
        servers: how the group works.
        num_workers: how many compute.
        startup_timeout_seconds: how long to wait for the workers to come.

        Raises:
          UserError: what servers can't do.
        """

        def make_engine(model, batch_spec):
            return TowersEngine(task, model, devices, options, batch_spec=batch_spec, shares=shares)

        self._group, self._servers, self._num_workers = group, servers, num_workers
        self._startup_timeout_seconds = startup_timeout_seconds
        self._together = num_workers if servers.is_sync else 1
        super().__init__("ps", task, options, make_engine, devices.num_towers * self._together)
        self._layout = Layout(
            shapes={name: tuple(value.shape) for name, value in self.engine.parameters().items()},
            num_servers=len(group.servers),
        )
        self._check_model()
        self._stop_asked = self._all_came = self._finished = False
        self._absent: list[int] = []
        self._workers: Mapping[str, Mapping] = {}
        self._reported_at: float | None = None
        self._give_all()

    def _check_model(self) -> None:
        if self.engine.placement.constraints:
            named = ", ".join(self.engine.placement.constraints)
            raise UserError(f"constraint on {named}: servers keep pieces of parameters; use another strategy")
        if self._together > 1 and self.options.batch_stats == "synced" and batch_norm_layers(self.model):
            raise UserError("batch_stats=synced with staleness=sync: workers meet after the step; use average")
        if len({value.dtype for value in self.engine.parameters().values()}) > 1:
            raise UserError("parameters of several precisions with strategy=ps: servers keep one vector of one")
        if self._servers.is_sync and self.options.accumulation > 1 and self.engine.state():
            raise UserError(
                f"accumulation={self.options.accumulation} with staleness=sync and batch statistics: workers meet "
                "once a step, not once a microbatch; use --accumulation=1 or --strategy=ring"
            )

    @property
    def is_exact(self) -> bool:
        return self._servers.is_serial or (self._servers.is_sync and not self._servers.backup_workers)

    @property
    def part_shares(self) -> tuple[float, ...]:
        return tuple(share / sum(self.engine.shares) for share in self.engine.shares) * self._together

    def agree(self, move: Move) -> Move:
        """A worker that was asked to stop stops all."""
        self._until = move.until
        return dataclasses.replace(move, stop=move.stop or self._stop_asked)

    def run_steps(self, num_steps: int) -> StepReport:
        # Between two calls the workers go on, if nothing was due.
        began = self._reported_at or time.perf_counter()
        bad_step = self._run_to(self.step + num_steps)
        taken, _ = self._group.ask(0, "report")
        self._reported_at = time.perf_counter()
        self._stop_asked = taken["stop_asked"]
        self._count(taken)
        report = self._report(taken, self._reported_at - began)
        if bad_step is not None:
            raise NonFiniteStep(
                f"step {bad_step} is not finite and was not applied: lower the learning rate, clip the gradients, "
                "clean the data, or go on with on_nan=skip",
                step=bad_step,
            )
        return report

    def _run_to(self, wanted: int) -> int | None:
        """Waits until so many steps are done, or one went wrong, which is returned.

        Raises:
          PeerLost: for too long nothing happened; who is missing is named.
        """
        moved, before = time.monotonic(), self.step
        while True:
            told, _ = self._group.ask(0, "run_to", wanted=wanted, until=max(wanted, self._until))
            self._absent = told["absent"]
            self._all_came = self._all_came or not self._absent
            if told["reached"] or told["bad_step"] is not None:
                return told["bad_step"]
            if told["done"] != before:
                moved, before = time.monotonic(), told["done"]
            limit = self._patience_seconds if self._all_came else self._startup_timeout_seconds
            if time.monotonic() - moved > limit:
                missing = told["absent"] or told["missing"] or range(self._num_workers)
                late = "did not answer" if self._all_came else "did not come"
                raise PeerLost(
                    f"{_named(missing)} {late} within {limit:g} seconds at step {before}: start it again"
                )
            # Workers end when another server is lost; who looks on must not wait for them.
            self._group.ask_all("keys")

    @property
    def _patience_seconds(self) -> float:
        """How long nothing may happen; without waiting, another has as long again for a lost worker's step."""
        return self._servers.timeout_seconds * (1 if self._servers.is_sync else 2)

    def _report(self, taken: Mapping, seconds: float) -> StepReport:
        means = {name: mean_of(*pair) for name, pair in taken["sums"].items()}
        workers = [self._worker_figures(name, total) for name, total in taken["workers"].items()]
        self._workers = taken["workers"]
        return StepReport(
            step=taken["done"],
            num_steps=taken["num_steps"],
            examples=taken["examples"],
            loss=means.pop("loss", math.nan),
            metrics=means,
            learning_rate=self.options.schedule(taken["done"] - 1),
            gradient_norm=math.nan if taken["norm"] is None else taken["norm"],
            skipped=taken["skipped"],
            seconds=seconds,
            input_seconds=max((worker.input_seconds for worker in workers), default=0.0),
            sections={
                SECTION: ServersReport(
                    staleness={int(staleness): count for staleness, count in taken["staleness"]},
                    turned_away=taken["turned_away"],
                    absent=tuple(_names(self._absent)),
                    workers=tuple(workers),
                    servers=tuple(self._server_figures()),
                )
            },
        )

    def _worker_figures(self, name: str, total: Mapping) -> WorkerFigures:
        """Since the last report, but for what is a maximum or counts failures."""
        before = self._workers.get(name, {})
        summed = ("steps", "busy_seconds", "input_seconds", "staleness_sum")
        return WorkerFigures(name=name, **(total | {what: total[what] - before.get(what, 0) for what in summed}))

    def _server_figures(self):
        """Since the beginning."""
        size = next(iter(self.engine.parameters().values())).dtype.size * (1 + len(self.engine.slots()))
        for place, (told, _) in enumerate(self._group.ask_all("figures")):
            piece = self._layout.piece(place)
            kept = (piece.stop - piece.start) * size
            yield ServerFigures(name=self._group.servers[place].name, kept_bytes=kept, **told)

    def _count(self, told: Mapping) -> None:
        """Takes over what server 0 counted since this process gave it everything."""
        totals, counters = told["totals"], self.engine.counters
        counters.step.assign(told["done"])
        counters.examples.assign(self._given["examples"] + totals["examples"])
        counters.updates.assign(self._given["updates"] + totals["steps"] - totals["skipped"])
        counters.skipped.assign(self._given["skipped"] + totals["skipped"])

    def _pause(self) -> None:
        """Until nobody computes: what is kept is then the same on all servers."""
        self._reported_at = None
        since = time.monotonic()
        while True:
            told, _ = self._group.ask(0, "pause")
            if told["idle"]:
                self._count(told)
                return
            if time.monotonic() - since > self._patience_seconds:
                missing = _named(told["missing"])
                raise PeerLost(
                    f"{missing} did not answer within {self._patience_seconds:g} seconds: start it again"
                )

    def evaluate(self, num_batches: int | None = None) -> dict[str, float]:
        self.collect()
        return super().evaluate(num_batches)

    def portable_model(self):
        self.collect()
        return super().portable_model()

    def restored(self) -> None:
        super().restored()
        self._give_all()

    def finish(self, completed: bool) -> None:
        self.collect()
        self._finished = True
        # Workers hear of it from server 0: by then the others know.
        for server in reversed(range(len(self._group.servers))):
            self._group.ask(server, "end", how="done" if completed else "interrupted")
        self._group.close()

    def graph(self) -> None:
        """None: the chief's own towers don't train."""

    def _give_all(self) -> None:
        """The servers take over this process's values; workers begin at its step."""
        engine, rule = self.engine, self.options.rule
        vector = self._layout.joined([value.numpy() for value in engine.parameters().values()])
        slots = {
            slot: self._layout.joined([value.numpy() for value in by_name.values()])
            for slot, by_name in engine.slots().items()
        }
        decays = np.concatenate(
            [
                np.full(math.prod(shape), bool(rule.decays(name, tf.TensorShape(shape))))
                for name, shape in self._layout.shapes.items()
            ]
        )
        self._given = {name: int(value) for name, value in engine.counters.variables().items()}
        self._until, updates = self.step, self._given["updates"]
        for server in range(len(self._group.servers)):
            piece = self._layout.piece(server)
            self._group.ask(server, "init", [vector[piece], decays[piece]], key=KEY)
            values = [vector[piece], *(slot[piece] for slot in slots.values())]
            self._group.ask(server, "set", values, key=KEY, names=list(slots), version=updates)
        state = [np.ravel(value.numpy()).astype(np.float64) for value in engine.state().values()]
        averaged = [
            np.full(value.shape.num_elements(), self.options.batch_stats == "average" and value.dtype.is_floating)
            for value in engine.state().values()
        ]
        arrays = [
            np.concatenate(found) if found else np.zeros(0, kind)
            for found, kind in ((state, "f8"), (averaged, "?"))
        ]
        self._group.ask(0, "start", arrays, step=self.step)

    def collect(self) -> None:
        """Pauses the workers and copies the servers' values into this process's variables."""
        if self._finished:
            return
        self._pause()
        answers = self._group.ask_all("pull", key=KEY)
        self._assign(self.engine.parameters(), np.concatenate([piece for _, (piece,) in answers]))
        answers = self._group.ask_all("get_slots", key=KEY)
        for place, slot in enumerate(answers[0][0]["names"]):
            self._assign(self.engine.slots()[slot], np.concatenate([arrays[place] for _, arrays in answers]))
        _, (state,) = self._group.ask(0, "get_state")
        begin = 0
        for variable in self.engine.state().values():
            end = begin + variable.shape.num_elements()
            variable.assign(tf.cast(state[begin:end].reshape(variable.shape), variable.dtype))
            begin = end

    def _assign(self, variables: Mapping[str, tf.Variable], vector: np.ndarray) -> None:
        for name, value in self._layout.split(vector).items():
            variables[name].assign(value)


def _named(workers) -> str:
    return ", ".join(_names(workers))


def _names(workers) -> list[str]:
    return [f"worker:{worker}" for worker in workers]
