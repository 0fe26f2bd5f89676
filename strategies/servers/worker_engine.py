"""What a worker computes: parameters in as one vector, the gradient out as one vector, by its own towers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from strategies.ring.worker_exchange import WIRE_PRECISIONS
from strategies.servers.layout import Layout, row_width
from strategies.servers.rows import Rows, SplitGradient
from towers import gradients, step_end
from towers.placement import CentralPlacement, canonical_names
from towers.task import Batch, batch_length
from towers.tower import TowerResult
from towers.towers_engine import TowersEngine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computed:
    """What a worker found out about its batch.

    Attributes:
      gradient: mean and clipped, or where workers meet before the update the SUM; in the wire's precision.
      state_change: float64 [all state], of the batch statistics and the like; a SUM as the gradient is.
      weight: of the loss.
      sums: (total, weight) of 'loss' and of the metrics.
      norm: of the mean gradient of this worker alone.
      finite: whether loss and gradients are.
      examples: in the batch.
    """

    gradient: SplitGradient
    state_change: np.ndarray
    weight: float
    sums: Mapping[str, tuple[float, float]]
    norm: float
    finite: bool
    examples: int


class _Outputs(NamedTuple):
    dense: tf.Tensor
    rows: Sequence[tuple[tf.Tensor, tf.Tensor]]
    state_change: tf.Tensor
    numbers: tf.Tensor


class WorkerEngine(TowersEngine):
    """Towers without variables of their own: their values come from servers, their gradients go there."""

    def __init__(
        self,
        *arguments,
        rank: int,
        num_together: int,
        meets: bool,
        stand_in: Batch | None,
        wire_precision: str,
        **named,
    ):
        """Args:
        rank: of this worker.
        num_together: workers that divide each batch; 1 where each takes batches of its own.
        meets: whether gradients are averaged with others' before the update, so that they are sent as SUMs.
        stand_in: a batch of one example for a worker without one; None where there is always one.
        wire_precision: what gradients are sent in.
        *arguments, **named: as the base class.
        """
        self._rank, self._num_together, self._meets = rank, num_together, meets
        self._stand_in = (
            None if stand_in is None else tf.nest.map_structure(lambda tensor: tensor.numpy(), stand_in)
        )
        self._wire = WIRE_PRECISIONS[wire_precision]
        super().__init__(*arguments, **named)
        self._whole = tf.function(self._undivided, autograph=False)
        self._first = tf.function(self._first_sums, autograph=False)
        self._more = tf.function(self._more_sums, autograph=False)
        self._finish = tf.function(self._outputs, autograph=False)

    @property
    def all_shares(self):
        # Each worker's part is the same, whatever its towers' shares add up to.
        return tuple(share / sum(self.shares) for share in self.shares) * self._num_together

    def make_variables(self):
        variables = self.tower.variables
        self.layout = layout_of(variables.parameters, num_servers=1)
        self._state_shapes = [tuple(variable.shape) for variable in variables.state]
        self._state_dtypes = [tf.as_dtype(variable.dtype) for variable in variables.state]
        self._sparse: list[str] = []
        self._metrics: list[str] = []
        self.placement = CentralPlacement(self.devices.parameters, {}, {}, {}, {})

    def compute(
        self, number: int, parameters: np.ndarray, state: np.ndarray, batches: Sequence[Batch]
    ) -> Computed:
        """One step.

        Args:
          number: of the step, for random numbers.
          parameters: the whole vector.
          state: float64, all of it.
          batches: this worker's part of each microbatch.
        """
        self.counters.step.assign(number)
        vector, state = tf.constant(parameters), tf.constant(state)
        out = (
            self._whole(vector, state, *batches)
            if len(batches) == 1
            else self._microbatches(vector, state, *batches)
        )
        weight, norm, finite, *sums = out.numbers.numpy().tolist()
        return Computed(
            gradient=self._split(out),
            state_change=out.state_change.numpy(),
            weight=weight,
            sums=dict(zip(self._metrics, zip(sums[::2], sums[1::2], strict=True), strict=True)),
            norm=norm,
            finite=bool(finite),
            examples=sum(tf.nest.flatten(batch.features)[0].shape[0] for batch in batches),
        )

    def _microbatches(self, vector, state, first, *others) -> _Outputs:
        sums = self._first(vector, state, first)
        for place, batch in enumerate(others, start=1):
            # Of a short batch some microbatches are empty; where workers meet, it may not be so for all.
            if self._meets or int(batch_length(batch)) > 0:
                sums = self._more(vector, batch, tf.constant(place), sums)
        return self._finish(state, sums)

    def _split(self, out: _Outputs) -> SplitGradient:
        begins = dict(zip(self.layout.shapes, self.layout.offsets, strict=False))
        rows = [
            Rows(begins[name], *self.layout.shapes[name], indices.numpy(), values.numpy())
            for name, (indices, values) in zip(self._sparse, out.rows, strict=True)
        ]
        return SplitGradient(out.dense.numpy(), rows)

    def _undivided(self, vector, state, batch) -> _Outputs:
        return self._outputs(state, self._first_sums(vector, state, batch))

    def _first_sums(self, vector, state, batch) -> TowerResult:
        return self._gather(batch, 0, self._parameters_in(vector), self._state_in(state))

    def _more_sums(self, vector, batch, place, sums) -> TowerResult:
        own = self._gather(batch, place, self._parameters_in(vector), sums.new_state)
        with tf.device(self.devices.parameters):
            return step_end.add_results([sums, own], self.placement.sum)._replace(new_state=own.new_state)

    def _outputs(self, state, sums) -> _Outputs:
        with tf.device(self.devices.parameters):
            old = self._state_in(state)
            mean = step_end.mean_gradients(sums, self.options, self.counters)
            if not self._meets:
                found, changes = (
                    mean.gradients,
                    [new - before for new, before in zip(sums.new_state, old, strict=True)],
                )
            else:
                found = [gradients.merged(gradient) for gradient in sums.gradients]
                policy = self.options.batch_stats
                _, *changes = step_end.changes_of_state(old, sums, first=self._rank == 0, batch_stats=policy)
            dense, rows = self._divided(found)
            reported = {"loss": (sums.loss_sum, sums.weight), **sums.metric_sums}
            self._metrics = list(reported)
            numbers = [sums.weight, mean.norm, mean.finite, *(part for pair in reported.values() for part in pair)]
            return _Outputs(
                dense,
                rows,
                _joined([tf.cast(change, tf.float64) for change in changes], tf.float64),
                tf.stack([tf.cast(number, tf.float64) for number in numbers]),
            )

    def _divided(self, found):
        """The dense gradients joined, and of each sparse one the rows."""
        names, self._sparse = list(self.layout.shapes), []
        dense, rows = [], []
        for name, gradient in zip(names, found, strict=True):
            shape = self.layout.shapes[name]
            # Only rows that no cut divides can be sent as rows.
            if isinstance(gradient, tf.IndexedSlices) and len(shape) == 2 and row_width(shape) == shape[1]:
                self._sparse.append(name)
                rows.append((tf.cast(gradient.indices, tf.int64), self._on_wire(gradient.values)))
            else:
                dense.append(self._on_wire(tf.convert_to_tensor(gradient)))
        return _joined(dense, self._wire or sums_dtype(found)), rows

    def _on_wire(self, values):
        return tf.cast(values, self._wire) if self._wire and values.dtype == tf.float32 else values

    def _parameters_in(self, vector):
        with tf.device(self.devices.parameters):
            shapes = list(self.layout.shapes.values())
            parts = tf.split(vector, [int(np.prod(shape)) for shape in shapes])
            return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def _state_in(self, state):
        if not self._state_shapes:
            return []
        parts = tf.split(state, [int(np.prod(shape)) for shape in self._state_shapes])
        described = zip(parts, self._state_shapes, self._state_dtypes, strict=True)
        return [tf.reshape(tf.cast(part, dtype), shape) for part, shape, dtype in described]

    def _part(self, batch, place):
        if self._stand_in is None:
            return super()._part(batch, place)
        return step_end.part_or_stand_in(batch, self._stand_in, place, self.shares)

    def _tower_number(self, microbatch_place, place):
        before = self._rank * len(self.shares) if self._num_together > 1 else 0
        return microbatch_place * len(self.all_shares) + before + place


def layout_of(parameters, num_servers: int) -> Layout:
    """The layout of a model's parameters, in its order."""
    shapes = [tuple(variable.shape) for variable in parameters]
    return Layout(shapes=dict(zip(canonical_names(parameters), shapes, strict=True)), num_servers=num_servers)


def sums_dtype(found) -> tf.DType:
    """Of some gradients."""
    return found[0].dtype


def _joined(tensors, dtype):
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0) if tensors else tf.zeros([0], dtype)
