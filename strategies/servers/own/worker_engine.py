"""A step of a worker of our own servers, on arrays: the host's side of `worker_graph`."""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from strategies.data_checks.data_errors import readable_errors, user_error_in
from strategies.servers.worker_graph import Outputs, StepValues, WorkerGraph
from towers.devices import HOST
from towers.layers.table_rows import TableRows
from towers.task import Batch, Task, batch_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computed:
    """What a worker computed from its batch.

    Attributes:
      gradient: gradient of the vector of all parameters that are not tables, in the wire's precision: the clipped
        mean, or the SUM if servers average the gradients of several workers.
      rows: the same for each matrix of tables: ids of rows, each once, and gradients [n, width].
      state_change: float64, the change of all state except the frozen weights, weighted like the gradient.
      weight: weight of the loss.
      sums: (total, weight) of 'loss' and of each metric.
      norm: norm of this worker's mean gradient, before clipping.
      finite: whether loss and gradients are finite.
      examples: number of examples in the batch.
    """

    gradient: np.ndarray
    rows: Sequence[tuple[np.ndarray, np.ndarray]]
    state_change: np.ndarray
    weight: float
    sums: Mapping[str, tuple[float, float]]
    norm: float
    finite: bool
    examples: int


class WorkerEngine:
    """A worker's step on arrays. Owns no parameters: their values come from servers and gradients go there.

    Attributes:
      options, tower, layout: those of its `WorkerGraph`.
    """

    def __init__(self, task: Task, model: keras.Model, *arguments, sends_sums: bool, **named):
        """Arguments as for `WorkerGraph`."""
        self.graph = WorkerGraph(task, model, *arguments, sends_sums=sends_sums, **named)
        self._model = model
        self.options, self.tower, self.layout = self.graph.options, self.graph.tower, self.graph.layout
        self._sends_sums, self._frozen = sends_sums, []
        # The number of a table's rows differs in each step: the second trace makes it an open dimension.
        has_tables = bool(self.layout.tables)

        def graph_of(function):
            return tf.function(function, autograph=False, reduce_retracing=has_tables)

        self._wanted_function = graph_of(self.graph.wanted)
        self._whole_function = graph_of(self.graph.whole)
        self._first_function = graph_of(self.graph.first_sums)
        self._more_function = graph_of(self.graph.more_sums)
        self._outputs_function = graph_of(self.graph.outputs)

    def wanted(self, batches: Sequence[Batch]) -> list[np.ndarray]:
        """The rows of each matrix of tables that a step needs: int64 [n], ascending, each once.

        Raises:
          UserError: an id is outside its table.
        """
        if not self.layout.tables:
            return []
        try:
            return [rows.numpy() for rows in self._wanted_function(*batches)]
        except tf.errors.InvalidArgumentError as error:
            raise user_error_in(error) or error from error

    def set_frozen(self, weights: Sequence[np.ndarray]) -> None:
        """Sets the frozen weights, in the model's order, for all later steps."""
        self._frozen = [tf.constant(weight) for weight in weights]

    def compute(
        self,
        step: int,
        part: int,
        parameters: np.ndarray,
        rows: Sequence[tuple[np.ndarray, np.ndarray]],
        state: np.ndarray,
        batches: Sequence[Batch],
    ) -> Computed:
        """One step.

        Args:
          step, part: index of the step, and of its batch's part; random numbers are derived from both.
          parameters: all parameters that are not tables, as one vector.
          rows: for each matrix of tables, the rows that `wanted` names and their values [n, width].
          state: all state except the frozen weights, as one vector.
          batches: the part of each microbatch.
        """
        where = f"step {step}"
        with tf.device(HOST):  # the host cuts the vector: a GPU would get all of it and send it back
            step, part = tf.constant(step, tf.int64), tf.constant(part, tf.int32)
            values = StepValues(
                tf.constant(parameters),
                [TableRows(tf.constant(ids), tf.constant(of_table)) for ids, of_table in rows],
                tf.constant(state),
                self._frozen,
            )
        run = self._whole_function if len(batches) == 1 else self._microbatches
        with readable_errors(where, self._model, batches):
            out = run(values, step, part, *batches)
            weight, norm, finite, *sums = out.numbers.numpy().tolist()
        return Computed(
            gradient=out.dense.numpy(),
            rows=[(ids.numpy(), values.numpy()) for ids, values in out.rows],
            state_change=out.state_change.numpy(),
            weight=weight,
            sums=dict(zip(self.graph.reported, zip(sums[::2], sums[1::2], strict=True), strict=True)),
            norm=norm,
            finite=bool(finite),
            examples=sum(tf.nest.flatten(batch.features)[0].shape[0] for batch in batches),
        )

    def _microbatches(self, values, step, part, first, *others) -> Outputs:
        sums = self._first_function(values, step, part, first)
        for index, batch in enumerate(others, start=1):
            # Some microbatches of a short batch are empty. Workers that share batches compute them nevertheless: a
            # microbatch that is empty here may not be empty elsewhere.
            if self._sends_sums or int(batch_length(batch)) > 0:
                sums = self._more_function(values, step, part, batch, tf.constant(index), sums)
        return self._outputs_function(values, part, sums)
