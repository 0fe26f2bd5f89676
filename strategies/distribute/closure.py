"""The steps that ClusterCoordinator runs on a worker: pull, compute, claim, update on the servers, count.

server 0    plan()  -------------------------->  claim(number)  ---->  count(number)
servers     pieces  --+                             |  update pieces  --+
worker       batch -> towers -> mean -> clip -> gradient, one part for each server
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from strategies.data_checks.data_errors import readable_tracing
from strategies.distribute import server_vectors
from strategies.distribute.frozen_weights import FrozenWeight, kept_or_pulled
from strategies.distribute.host_functions import call
from strategies.distribute.server_tables import DealtRows, ServerTable, pulled_rows
from strategies.servers.piece_update import update_piece
from strategies.servers.worker_graph import Outputs, StepValues, WorkerGraph
from towers.input.tower_parts import microbatch
from towers.task import Batch, batch_length

_CPU = "/device:CPU:0"
_BOOL, _INT = tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int64)
# The order of the figures that `count` gets. With tables, the elements of rows from each server follow; then sums.
FIGURES = ("worker", "started", "examples", "busy_seconds", "input_seconds", "norm", "finite", "stop_asked")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunVectors:
    """The variables of a run, in pieces by server.

    Attributes:
      parameters, state: the vectors of the parameters (without tables) and of the state.
      slots: by name.
      tables: the matrices that hold the tables' rows.
      frozen: the frozen weights, in the model's order.
      decays: 1 where weight decay applies, in the parameters' dtype; None if the rule has none.
      num_parameters, num_state: lengths without padding.
    """

    parameters: list[tf.Variable]
    state: list[tf.Variable]
    slots: Mapping[str, list[tf.Variable]]
    frozen: Sequence[FrozenWeight]
    decays: list[tf.Variable] | None
    tables: Sequence[ServerTable]
    num_parameters: int
    num_state: int


def traced_step(graph: WorkerGraph) -> Callable[[StepValues, tf.Tensor, Batch], Outputs]:
    """A function of values, a step's number and a batch that computes the step; traced once for all closures.

    Tracing it separately for each of eight steps took the chief 8 of 13 s (a small network, four microbatches),
    during which workers are idle.
    """

    @tf.function(autograph=False)
    def step(values: StepValues, number: tf.Tensor, batch: Batch) -> Outputs:
        count = graph.options.accumulation
        if count == 1:
            return graph.whole(values, number, 0, batch)
        sums = graph.first_sums(values, number, 0, microbatch(batch, 0, count))
        for index in range(1, count):
            micro = microbatch(batch, index, count)

            def more(sums=sums, micro=micro, index=index):
                return graph.more_sums(values, number, 0, micro, index, sums)

            # A last batch with fewer examples than microbatches leaves some empty: kernels fail on empty tensors.
            sums = tf.cond(batch_length(micro) > 0, more, lambda sums=sums: sums)
        return graph.outputs(values, 0, sums)

    return step


class StepClosure:
    """Builds the graph of some steps. It captures no variable of the chief, because it runs on workers."""

    def __init__(
        self,
        graph: WorkerGraph,
        compute: Callable[[StepValues, tf.Tensor, Batch], Outputs],
        vectors: RunVectors,
        batch_spec: Batch,
        run: str,
        *,
        num_steps: int,
    ):
        """Args:
        graph: the towers of a worker.
        compute: as `traced_step` makes it of the graph.
        vectors: the run's variables.
        batch_spec: the spec of a worker's batch, dimension 0 open.
        run: epoch of the run, for `Claims`.
        num_steps: number of steps, one after another.
        """
        self._graph, self._compute = graph, compute
        self._vectors, self._batch_spec, self._run = vectors, batch_spec, run
        self.num_steps = num_steps
        # In a tf.function its result on the worker would wait for each read and update: two more messages per
        # step. Without automatic control dependencies, the order is exactly what is written here.
        self.function = tf.compat.v1.wrap_function(
            self._steps,
            signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([num_steps], tf.float32)],
            name="steps",
        )

    def _steps(self, first: tf.Tensor, rates: tf.Tensor) -> tf.Tensor:
        """Steps first, first + 1, ..., unrolled: a `tf.while_loop` over processes takes twice the CPU time."""
        servers = [_At.of(piece.device, first, rates) for piece in self._vectors.parameters]
        with tf.device(servers[0].device):
            count = tf.constant(self.num_steps, tf.int64)
            (answer,) = call("plan", [servers[0].first, count], [tf.TensorSpec([None], tf.int64)])
            updates, start, plan = answer[0], answer[1], answer[2:]
        frozen = kept_or_pulled(self._vectors.frozen, start, after=updates)
        read = ()
        for index in range(self.num_steps):
            number = first + index
            with tf.control_dependencies(read):
                batch, about = self._next_batch(number, index, plan)
            updates = self._step(number, index, servers, frozen, batch, about, since=updates)
            # Steps take their batches in order.
            read = [about]
        return updates

    def _step(self, number, index, servers, frozen, batch, about, *, since) -> tf.Tensor:
        """One step, which pulls after `since` updates; returns the number of updates when it is counted."""
        vectors = self._vectors
        wanted = self._graph.wanted(batch)
        dealt = [DealtRows.of(rows, len(servers)) for rows in wanted]
        parameters = server_vectors.pulled(vectors.parameters, vectors.num_parameters, after=since)
        state = server_vectors.pulled(vectors.state, vectors.num_state, after=since)
        rows = [
            pulled_rows(table.rows, ids, of_table, after=since)
            for table, ids, of_table in zip(vectors.tables, wanted, dealt, strict=True)
        ]
        began = _clock(parameters)
        with readable_tracing("training"):
            found = self._compute(StepValues(parameters, rows, state, frozen), number, batch)
        _, norm, finite, *sums = tf.unstack(found.numbers)
        worker, started, input_seconds, stop_asked = tf.unstack(about)
        examples = tf.cast(batch_length(batch), tf.float64)
        busy = _clock(norm) - began
        named = [worker, started, examples, busy, input_seconds, norm, finite, stop_asked]
        figures = tf.stack([*named, *self._row_elements(dealt), *sums])
        return self._pushed(index, servers, since, found, figures)

    def _row_elements(self, dealt) -> list[tf.Tensor]:
        """Number of elements of tables' rows that a step pulls from each server."""
        tables = self._vectors.tables
        counts = [
            [count * table.layout.width for count in rows.counts()]
            for table, rows in zip(tables, dealt, strict=True)
        ]
        return [tf.add_n(of_server) for of_server in zip(*counts, strict=True)]

    def _next_batch(self, number, index, plan):
        """This worker's next batch; its rank, start time, seconds waited, and whether it was asked to stop."""
        specs = tf.nest.flatten(self._batch_spec)
        with tf.device(_CPU):
            index = tf.constant(index, tf.int64)
            *tensors, about = call("next_batch", [number, index, plan], [*specs, tf.TensorSpec([4], tf.float64)])
        return tf.nest.pack_sequence_as(self._batch_spec, tensors), about

    def _pushed(self, index, servers, since, found: Outputs, figures) -> tf.Tensor:
        """Claims the step, updates all servers if the claim allows it, and then counts the step.

        The worker sends each server its gradient, and server 0 one more tensor: each tensor is a message.
        """
        vectors = self._vectors
        gradients = server_vectors.cut(found.dense, vectors.parameters)
        changes = server_vectors.cut(tf.cast(found.state_change, vectors.state[0].dtype), vectors.state)
        rows = self._rows_by_server(found.rows)
        with tf.device(servers[0].device):
            run, number = tf.constant(self._run), servers[0].first + index
            # The figures contain the gradient's norm, so a step is claimed only after its gradient was computed.
            figures = tf.identity(figures)
            allowed, update = call("claim", [run, number, since, figures], [_BOOL, _INT])
        updated = [
            self._update(server, allowed, gradient, change, of_server, (at.rates[index], update))
            for server, (at, gradient, change, of_server) in enumerate(
                zip(servers, gradients, changes, rows, strict=True)
            )
        ]
        with tf.device(servers[0].device), tf.control_dependencies(updated):
            (updates,) = call("count", [run, number, figures], [_INT])
            return updates

    def _rows_by_server(self, found) -> list[list[tuple[tf.Tensor, tf.Tensor]]]:
        """For each server, (ids, gradients) of its rows in each matrix of tables."""
        count = len(self._vectors.parameters)
        by_table = []
        for ids, values in found:
            dealt = DealtRows.of(ids, count)
            by_table.append(list(zip(dealt.ids, dealt.divided(values), strict=True)))
        return [[of_table[server] for of_table in by_table] for server in range(count)]

    def _update(self, server, allowed, gradient, change, rows, how) -> tf.Tensor:
        """Updates one server's pieces, on that server."""
        vectors = self._vectors
        value, state = vectors.parameters[server], vectors.state[server]
        slots = {name: pieces[server] for name, pieces in vectors.slots.items()}

        # The branches take tensors that are already on the server: a Switch is on its input's device, so otherwise
        # the worker would wait for `allowed` before it sends its gradient. Branches inherit no device.
        with tf.device(value.device):
            gradient, change = tf.identity(gradient), tf.identity(change) if vectors.num_state else None
            rows = [(tf.identity(ids), tf.identity(values)) for ids, values in rows]

        @tf.function(autograph=False)
        def applied():
            with tf.device(value.device):
                decays = None if vectors.decays is None else vectors.decays[server].read_value()
                rule = self._graph.options.rule
                for table, (ids, values) in zip(vectors.tables, rows, strict=True):
                    table.update(server, rule, ids, values, *how)
                update_piece(rule, value, slots, decays, tf.cast(gradient, value.dtype), *how)
                if vectors.num_state:
                    state.assign_add(change)
                return tf.constant(True)

        def apply():
            with tf.device(value.device):
                return applied()

        def leave():
            with tf.device(value.device):
                return tf.constant(False)

        with tf.device(value.device):
            return tf.cond(allowed, apply, leave)


class _At(NamedTuple):
    """The closure's arguments on a server, sent once per closure."""

    device: str
    first: tf.Tensor
    rates: Sequence[tf.Tensor]

    @classmethod
    def of(cls, device, first, rates):
        with tf.device(device):
            return cls(device, tf.identity(first), tf.unstack(tf.identity(rates)))


def _clock(after: tf.Tensor) -> tf.Tensor:
    """The worker's clock in seconds, float64, when `after` is computed."""
    with tf.device(_CPU), tf.control_dependencies([after]):
        return tf.timestamp()
