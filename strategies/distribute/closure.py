"""The steps that ClusterCoordinator runs on a worker: pull, compute, claim, update on the servers, count.

server 0    updates()  ----------------------->  claim(number)  ---->  count(number)
servers     pieces  --+                             |  update pieces  --+
worker       batch -> towers -> mean -> clip -> gradient, one part for each server
"""

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from strategies.distribute import server_vectors
from strategies.distribute.host_functions import call
from strategies.servers.piece_update import update_piece
from strategies.servers.worker_graph import Outputs, WorkerGraph
from towers.task import Batch, batch_length
from towers.tower_parts import microbatch

_CPU = "/device:CPU:0"
_BOOL, _INT = tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int64)
# Position of each figure that `count` gets; the sums follow.
FIGURES = ("worker", "started", "examples", "busy_seconds", "input_seconds", "norm", "finite", "stop_asked")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunVectors:
    """The variables of a run, in pieces by server.

    Attributes:
      parameters, state: the vectors.
      slots: by name.
      decays: 1 where weight decay applies, in the parameters' dtype; None if the rule has none.
      num_parameters, num_state: lengths without padding.
    """

    parameters: list[tf.Variable]
    state: list[tf.Variable]
    slots: Mapping[str, list[tf.Variable]]
    decays: list[tf.Variable] | None
    num_parameters: int
    num_state: int


class StepClosure:
    """Builds the graph of some steps. It captures no variable of the chief, because it runs on workers."""

    def __init__(self, graph: WorkerGraph, vectors: RunVectors, batch_spec: Batch, run: str, *, num_steps: int):
        """Args:
        graph: computes the gradient.
        vectors: the run's variables.
        batch_spec: the spec of a worker's batch, dimension 0 open.
        run: epoch of the run, for `Claims`.
        num_steps: number of steps, one after another.
        """
        self._graph, self._vectors, self._batch_spec, self._run = graph, vectors, batch_spec, run
        self.num_steps = num_steps
        self.function = tf.function(
            self._steps,
            input_signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([num_steps], tf.float32)],
            autograph=False,
        )

    def _steps(self, first: tf.Tensor, rates: tf.Tensor) -> tf.Tensor:
        """Steps first, first + 1, ... Not a loop in the graph: iterations over several machines are slow."""
        counted = [self._step(first + index, rate) for index, rate in enumerate(tf.unstack(rates))]
        return tf.stack(counted)

    def _step(self, number: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        vectors = self._vectors
        batch, (worker, started, input_seconds, stop_asked) = self._next_batch(number)
        began = tf.timestamp()
        with tf.device(vectors.parameters[0].device):
            (since,) = call("updates", [], [_INT])
        with tf.control_dependencies([since]):
            parameters = server_vectors.pulled(vectors.parameters, vectors.num_parameters)
            state = server_vectors.pulled(vectors.state, vectors.num_state)
        found = self._computed(parameters, state, number, batch)
        with tf.control_dependencies([found.dense, found.numbers]):
            busy = tf.timestamp() - began
        _, norm, finite, *sums = tf.unstack(found.numbers)
        examples = tf.cast(batch_length(batch), tf.float64)
        figures = [worker, started, examples, busy, input_seconds, norm, finite, stop_asked, *sums]
        return self._pushed(number, since, rate, found, finite, tf.stack(figures))

    def _next_batch(self, number):
        """This worker's next batch; its index, start time, seconds waited, and whether it was asked to stop."""
        specs = tf.nest.flatten(self._batch_spec)
        with tf.device(_CPU):
            *tensors, about = call("next_batch", [number], [*specs, tf.TensorSpec([4], tf.float64)])
        return tf.nest.pack_sequence_as(self._batch_spec, tensors), tf.unstack(about)

    def _computed(self, parameters, state, number, batch) -> Outputs:
        count = self._graph.options.accumulation
        if count == 1:
            return self._graph.whole(parameters, state, number, batch)
        sums = self._graph.first_sums(parameters, state, number, microbatch(batch, 0, count))
        for index in range(1, count):
            micro = microbatch(batch, index, count)

            def more(sums=sums, micro=micro, index=index):
                return self._graph.more_sums(parameters, number, micro, index, sums)

            # A last batch with fewer examples than microbatches leaves some empty: kernels fail on empty tensors.
            sums = tf.cond(batch_length(micro) > 0, more, lambda sums=sums: sums)
        return self._graph.outputs(state, sums)

    def _pushed(self, number, since, rate, found: Outputs, finite, figures) -> tf.Tensor:
        """Claims the step, updates all servers if it may, and counts it after that."""
        vectors, run = self._vectors, tf.constant(self._run)
        gradients = server_vectors.cut(found.dense, vectors.parameters)
        changes = server_vectors.cut(found.state_change, vectors.state)
        server_0 = vectors.parameters[0].device
        with tf.device(server_0), tf.control_dependencies([*gradients, *changes]):
            allowed, staleness, update = call("claim", [run, number, since, finite], [_BOOL, _INT, _INT])
        updated = [
            self._update(server, allowed, gradient, change, rate, update)
            for server, (gradient, change) in enumerate(zip(gradients, changes, strict=True))
        ]
        with tf.device(server_0), tf.control_dependencies(updated):
            (counted,) = call("count", [run, number, allowed, staleness, figures], [_BOOL])
            return counted

    def _update(self, server, allowed, gradient, change, rate, update) -> tf.Tensor:
        """Updates one server's pieces, on that server."""
        vectors = self._vectors
        value, state = vectors.parameters[server], vectors.state[server]
        slots = {name: pieces[server] for name, pieces in vectors.slots.items()}

        def apply():
            decays = None if vectors.decays is None else vectors.decays[server].read_value()
            rule = self._graph.options.rule
            update_piece(rule, value, slots, decays, tf.cast(gradient, value.dtype), rate, update)
            state.assign_add(change)
            return tf.constant(True)

        with tf.device(value.device):
            return tf.cond(allowed, apply, lambda: tf.constant(False))
