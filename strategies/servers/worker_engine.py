"""A step of a worker of our own servers, on arrays: the host's side of `worker_graph`."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from strategies.servers.rows import Rows, SplitGradient
from strategies.servers.worker_graph import Outputs, WorkerGraph
from towers.task import Batch, batch_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computed:
    """What a worker computed from its batch.

    Attributes:
      gradient: the mean, clipped; or the SUM, if servers average the gradients of several workers. In the wire's
        precision.
      state_change: float64 [all state], the change of the batch statistics; weighted like the gradient.
      weight: weight of the loss.
      sums: (total, weight) of 'loss' and of each metric.
      norm: norm of this worker's mean gradient, before clipping.
      finite: whether loss and gradients are finite.
      examples: number of examples in the batch.
    """

    gradient: SplitGradient
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

    def __init__(self, *arguments, sends_sums: bool, **named):
        """Arguments as for `WorkerGraph`."""
        self.graph = WorkerGraph(*arguments, sends_sums=sends_sums, **named)
        self.options, self.tower, self.layout = self.graph.options, self.graph.tower, self.graph.layout
        self._sends_sums = sends_sums
        self._whole_function = tf.function(self.graph.whole, autograph=False)
        self._first_function = tf.function(self.graph.first_sums, autograph=False)
        self._more_function = tf.function(self.graph.more_sums, autograph=False)
        self._outputs_function = tf.function(self.graph.outputs, autograph=False)

    def compute(self, step: int, parameters: np.ndarray, state: np.ndarray, batches: Sequence[Batch]) -> Computed:
        """One step.

        Args:
          step: index of the step, from which random numbers are derived.
          parameters: all parameters as one vector.
          state: float64, all state as one vector.
          batches: this worker's part of each microbatch.
        """
        vector, state, step = tf.constant(parameters), tf.constant(state), tf.constant(step, tf.int64)
        out = (
            self._whole_function(vector, state, step, *batches)
            if len(batches) == 1
            else self._microbatches(vector, state, step, *batches)
        )
        weight, norm, finite, *sums = out.numbers.numpy().tolist()
        return Computed(
            gradient=self._split(out),
            state_change=out.state_change.numpy(),
            weight=weight,
            sums=dict(zip(self.graph.reported, zip(sums[::2], sums[1::2], strict=True), strict=True)),
            norm=norm,
            finite=bool(finite),
            examples=sum(tf.nest.flatten(batch.features)[0].shape[0] for batch in batches),
        )

    def _microbatches(self, vector, state, step, first, *others) -> Outputs:
        sums = self._first_function(vector, state, step, first)
        for index, batch in enumerate(others, start=1):
            # Some microbatches of a short batch are empty. Workers that share batches take them all the same:
            # a microbatch that is empty here may not be empty elsewhere.
            if self._sends_sums or int(batch_length(batch)) > 0:
                sums = self._more_function(vector, step, batch, tf.constant(index), sums)
        return self._outputs_function(state, sums)

    def _split(self, out: Outputs) -> SplitGradient:
        begins = dict(zip(self.layout.shapes, self.layout.offsets, strict=False))
        rows = [
            Rows(begins[name], *self.layout.shapes[name], indices.numpy(), values.numpy())
            for name, (indices, values) in zip(self.graph.sparse, out.rows, strict=True)
        ]
        return SplitGradient(out.dense.numpy(), rows)
