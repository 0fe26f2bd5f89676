"""The chief's interface to TensorFlow's servers and workers: ParameterServerStrategy and ClusterCoordinator."""

import contextlib
import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from strategies.distribute import server_vectors
from strategies.distribute.closure import RunVectors, StepClosure, traced_step
from strategies.distribute.coordinator_connection import BOOL, CoordinatorConnection, lost_named
from strategies.distribute.frozen_weights import FrozenWeight
from strategies.distribute.server_tables import ServerTable
from strategies.distribute.worker_watch import WorkerWatch
from strategies.errors import PeerLost
from strategies.servers.carrier import Paused, Progress, Start
from strategies.servers.one_chief import process_name
from strategies.servers.report_section import ServerFigures
from strategies.servers.server_memory import variable_bytes
from strategies.servers.tables import Stored
from strategies.servers.worker_graph import WorkerGraph
from towers.task import Batch
from towers.updates.rules import UpdateRule

# Number of steps that are scheduled ahead of the last one done: for each worker, and for each second of work.
_AHEAD_PER_WORKER = 2
_AHEAD_SECONDS = 0.3
# A call from the chief takes 4 ms in all processes; ten steps in one take a quarter of the CPU time a step (AVX2).
# A worker that does more steps than this in a second computes several for each call.
_FAST_STEPS_PER_SECOND = 10
_MOST_STEPS = 8
_FIRST_PER_WORKER = 2
_PATIENCE_SECONDS = 1.0
_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.02, 0.1
_END_SECONDS = 10.0


class CoordinatedCarrier:
    """Implements `strategies.servers.carrier.Carrier`."""

    def __init__(
        self,
        connection: CoordinatorConnection,
        graph: WorkerGraph,
        batch_spec: Batch,
        *,
        schedule: Callable[[int], float],
        rule: UpdateRule,
        free_bytes: Mapping[str, int],
        stops_if_bad: bool,
        lazily: bool,
        steps_per_closure: int = 0,
        worker_timeout_seconds: float = 60.0,
    ):
        """Args:
        connection: connection to the servers and workers.
        graph: what a worker computes.
        batch_spec: the spec of a worker's batch, dimension 0 open.
        schedule: learning rate by step.
        rule: the update rule.
        free_bytes: bytes of memory that each server can still get, by its name.
        stops_if_bad: whether no step is applied after one that was not finite.
        lazily: whether tables are updated lazily.
        steps_per_closure: steps that a worker computes for each call from the chief; 0 chooses by their time.
        worker_timeout_seconds: seconds that a step may take before another worker computes it too.
        """
        self._connection, self._graph, self._batch_spec = connection, graph, batch_spec
        self._step = traced_step(graph)
        self._schedule, self._rule, self._stops_if_bad = schedule, rule, stops_if_bad
        self._lazily, self._free_bytes = lazily, free_bytes
        self._vectors: RunVectors | None = None
        self._worker_timeout_seconds = worker_timeout_seconds
        self._next = self._done = 0
        # TensorFlow runs a collective at most once in a graph's run.
        self._steps_per_closure, self._closures = 1 if graph.has_collectives else steps_per_closure, {}
        self._began: tuple[float, int] | None = None
        self._figures: Mapping = {}
        self._rate = 0.0

    def free_bytes(self) -> Mapping[str, int]:
        return self._free_bytes

    def start(self, begin: Start) -> None:
        if self._vectors is None:
            self._vectors = self._new_vectors(begin)
            self._run = uuid.uuid4().hex
            # Tracing determines which sums a step reports.
            self._closure(1)
        else:
            parameters = self._stored(begin)
            server_vectors.assign(self._vectors.parameters, parameters.vector)
            server_vectors.assign(self._vectors.state, begin.state)
            for weight, value in zip(self._vectors.frozen, begin.frozen, strict=True):
                weight.assign(value)
            for table, rows in zip(self._vectors.tables, parameters.tables, strict=True):
                table.assign(rows)
        first = {
            "run": self._run,
            "chief": process_name(),
            "first": begin.step,
            "updates": begin.updates,
            "reported": self._graph.reported,
            "stops_if_bad": self._stops_if_bad,
            "num_workers": len(self._connection.workers),
            "positions": begin.positions,
        }
        self._ask_first("begin", json.dumps(first), output=BOOL)
        self._watch = WorkerWatch(
            self._connection.workers,
            self._worker_timeout_seconds,
            open_steps=lambda end: self._ask_first("open_steps", tf.constant(end, tf.int64)),
            count_lost=lambda names: self._ask_first("lost", json.dumps(names)),
        )
        self._next = self._done = begin.step
        self._began = None

    def _closure(self, num_steps: int) -> StepClosure:
        if num_steps not in self._closures:
            self._closures[num_steps] = StepClosure(
                self._graph, self._step, self._vectors, self._batch_spec, self._run, num_steps=num_steps
            )
        return self._closures[num_steps]

    def _stored(self, begin: Start) -> Stored:
        return self._graph.layout.stored({name: variable.numpy() for name, variable in begin.parameters.items()})

    def _new_vectors(self, begin: Start) -> RunVectors:
        vectors = server_vectors.ServerVectors(self._connection.strategy, len(self._connection.servers))
        parameters = self._stored(begin)
        decays, zeros = begin.decays.astype(parameters.vector.dtype), np.zeros_like(parameters.vector)
        return RunVectors(
            parameters=vectors.new(parameters.vector, "parameters"),
            state=vectors.new(begin.state, "state"),
            slots={name: vectors.new(zeros, name) for name in begin.slot_names},
            frozen=[FrozenWeight(vectors, value, f"frozen_{i}") for i, value in enumerate(begin.frozen)],
            decays=vectors.new(decays, "decays") if self._rule.weight_decay else None,
            tables=[
                ServerTable(self._connection.strategy, layout, rows, begin.slot_names, lazily=self._lazily)
                for layout, rows in zip(self._graph.layout.tables, parameters.tables, strict=True)
            ],
            num_parameters=len(parameters.vector),
            num_state=len(begin.state),
        )

    def _ask_first(self, name, *inputs, **more):
        return self._connection.ask(self._connection.servers[0], name, *inputs, **more)

    def advance(self, wanted: int, until: int) -> Progress:
        self._fill(until)
        # Returns early enough to schedule more before the workers run out of steps.
        low = min(wanted, self._done + max(1, (self._next - self._done) // 2))
        with lost_named(self._connection.servers):
            self._connection.coordinator.done()
        reply = self._waited(low)
        self._done = reply["done"]
        self._measure()
        self._repeat_late(reply)
        absent = () if self._done >= low else self._watch.absent(self._done)
        return Progress(done=self._done, bad_step=reply["bad_step"], absent=absent, missing=())

    def _waited(self, wanted: int) -> Mapping:
        """Waits a short time until `wanted` steps are counted; returns the progress.

        It polls, because a call that waits in the other process would hold Python's lock here, so that the
        coordinator's threads could not send the workers their steps.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            reply = self._ask_first("progress")
            missing = wanted - reply["done"]
            if missing <= 0 or reply["bad_step"] is not None or time.monotonic() > deadline:
                return reply
            expected = missing / self._rate if self._rate else 0.0
            time.sleep(min(_LONGEST_POLL_SECONDS, max(_SHORTEST_POLL_SECONDS, expected / 2)))

    def _measure(self) -> None:
        """Measures steps per second since the last pause, without the first steps, which compile."""
        now, num_workers = time.monotonic(), len(self._connection.workers)
        if self._began is None:
            self._began = now, self._done + _FIRST_PER_WORKER * num_workers
        since, first = self._began
        if self._done < first:
            self._began = now, first
        elif self._done > first and now > since:
            self._rate = (self._done - first) / (now - since)

    @property
    def _most(self) -> int:
        """The largest number of steps of a closure."""
        is_fast = self._rate > len(self._connection.workers) * _FAST_STEPS_PER_SECOND
        return self._steps_per_closure or (_MOST_STEPS if is_fast else 1)

    def _fill(self, until: int) -> None:
        """Schedules steps. Only few wait at a time, so that a pause is short."""
        most = self._most
        at_least = _AHEAD_PER_WORKER * len(self._connection.workers) * most
        ahead = max(at_least, math.ceil(self._rate * _AHEAD_SECONDS))
        while (left := min(until, self._done + ahead) - self._next) > 0:
            steps = range(self._next, self._next + (most if left >= most else 1))
            self._schedule_closure(steps)
            self._next += len(steps)

    def _schedule_closure(self, steps: range) -> None:
        rates = tf.constant([self._schedule(step) for step in steps], tf.float32)
        arguments = (tf.constant(steps[0], tf.int64), rates)
        with lost_named(self._connection.servers):
            self._connection.coordinator.schedule(self._closure(len(steps)).function, args=arguments)

    def _repeat_late(self, reply: Mapping) -> None:
        """Reschedules the steps of stalled workers, which may also continue later."""
        if reply["bad_step"] is None and self._next > self._done:
            at_once = len(self._connection.workers) * max(self._most, *self._closures)
            for step in self._watch.late_steps(self._next, at_once):
                self._schedule_closure(range(step, step + 1))

    def pause(self) -> Paused:
        reply = self._waited(self._next)
        with lost_named(self._connection.servers):
            is_idle = self._connection.coordinator.done()
        self._done = reply["done"]
        self._repeat_late(reply)
        absent = self._watch.absent(self._done)
        # Other workers have done all steps of a stalled worker, so it can claim none of them.
        is_idle = is_idle or self._done >= self._next
        return Paused(idle=is_idle, missing=absent, **self._ask_first("totals"))

    def read(self, slot: str | None, name: str, begin: int, end: int) -> np.ndarray:
        layout, vectors = self._graph.layout, self._vectors
        with lost_named(self._connection.servers):
            if (in_table := layout.table_of(name)) is not None:
                index, row = in_table
                width = layout.tables[index].width
                return np.ravel(vectors.tables[index].read_rows(slot, row + begin // width, row + end // width))
            first, pieces = layout.begin_of(name), vectors.parameters if slot is None else vectors.slots[slot]
            return server_vectors.read_part(pieces, first + begin, first + end)

    def write(self, slot: str | None, name: str, begin: int, values: np.ndarray) -> None:
        layout, vectors = self._graph.layout, self._vectors
        with lost_named(self._connection.servers):
            if (in_table := layout.table_of(name)) is not None:
                index, row = in_table
                width = layout.tables[index].width
                return vectors.tables[index].write_rows(slot, row + begin // width, values.reshape(-1, width))
            pieces = vectors.parameters if slot is None else vectors.slots[slot]
            server_vectors.write_part(pieces, layout.begin_of(name) + begin, values)

    def state(self) -> np.ndarray:
        with lost_named(self._connection.servers):
            return server_vectors.read_part(self._vectors.state, 0, self._vectors.num_state)

    def report(self) -> Mapping:
        self._watch.absent(self._done)
        self._figures = self._ask_first("report")
        of_servers = any(self._connection.ask(server, "stop_asked") for server in self._connection.servers)
        return {**self._figures, "stop_asked": self._figures["stop_asked"] or of_servers}

    def server_figures(self) -> Sequence[ServerFigures]:
        """Bytes are those of the values; what TensorFlow's messages add is not counted, nor each worker's first
        pull of the frozen weights."""
        vectors, pulls, pushes = self._vectors, self._figures["pulls"], self._figures["pushes"]
        row_elements = dict(self._figures["row_elements"])
        found = []
        for index, server in enumerate(self._connection.servers):
            value, state = vectors.parameters[index], vectors.state[index]
            wire_bytes = self._graph.wire_dtype(value.dtype).size
            pulled = variable_bytes(value) + variable_bytes(state)
            pushed = value.shape[0] * wire_bytes + variable_bytes(state)
            slots = sum(variable_bytes(pieces[index]) for pieces in vectors.slots.values())
            tables = sum(table.kept_bytes(index) for table in vectors.tables)
            frozen = sum(variable_bytes(weight.variables()[index]) for weight in vectors.frozen)
            in_rows = row_elements.get(index, 0)
            found.append(
                ServerFigures(
                    name=server.name,
                    kept_bytes=pulled + slots + tables + frozen,
                    pulls=pulls,
                    pushes=pushes,
                    sent_bytes=pulls * pulled + in_rows * value.dtype.size,
                    received_bytes=pushes * pushed + in_rows * wire_bytes,
                )
            )
        return found

    def end(self, how: str) -> None:
        """Ends workers and servers. Skips lost ones, and does not wait for one that hangs."""

        def end_one(member):
            # TensorFlow may have dropped the devices of a lost process.
            with contextlib.suppress(PeerLost, tf.errors.OpError):
                self._connection.ask(member, "end", how, output=BOOL)

        for member in (*self._connection.workers, *reversed(self._connection.servers)):
            asking = threading.Thread(target=end_one, args=[member], daemon=True)
            asking.start()
            asking.join(_END_SECONDS)
