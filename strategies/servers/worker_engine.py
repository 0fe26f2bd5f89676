"""What a worker of a parameter-server group computes: all parameters in as one vector, one gradient vector out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from strategies.servers.layout import Layout, row_width
from strategies.servers.rows import Rows, SplitGradient
from strategies.wire_precisions import WIRE_PRECISIONS
from towers import batch_stats, gradients, split
from towers.counters import Counters
from towers.devices import HOST, Devices
from towers.exchange import TowerExchange
from towers.mean_and_update import mean_gradients
from towers.options import StepOptions
from towers.placement import canonical_names
from towers.precision import loss_scaling_for
from towers.sums import add_to
from towers.task import Batch, Task, batch_length
from towers.tower import ModelVariables, TowerFunction, TowerResult
from towers.tower_parts import TowerParts
from towers.tower_passes import TowerPasses


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


class _Outputs(NamedTuple):
    dense: tf.Tensor
    rows: Sequence[tuple[tf.Tensor, tf.Tensor]]
    state_change: tf.Tensor
    numbers: tf.Tensor


class WorkerEngine:
    """The towers of a worker. Owns no parameters: their values come from servers and gradients go there."""

    def __init__(
        self,
        task: Task,
        model: keras.Model,
        devices: Devices,
        options: StepOptions,
        *,
        shares: Sequence[float] | None = None,
        rank: int,
        num_sharing: int,
        sends_sums: bool,
        stand_in: Batch | None,
        wire_precision: str,
    ):
        """Args:
        task: gives the loss and the metrics.
        model: a built template.
        devices: devices of the towers.
        options: options of the step.
        shares: relative sizes of the towers' parts; None for equal parts.
        rank: index of this worker.
        num_sharing: workers that divide each batch; 1 if each worker takes batches of its own.
        sends_sums: whether servers average the gradients of several workers, so that workers send SUMs.
        stand_in: a batch of one example, for a worker whose part of a batch is empty; None if none ever is.
        wire_precision: number format of the gradients that are sent, a key of WIRE_PRECISIONS.

        Raises:
          UserError: shares that don't fit the towers, or a batch too small for all towers.
        """
        self.options = options
        self._devices, self._rank, self._sends_sums = devices, rank, sends_sums
        shares = split.checked_shares(shares, devices.num_towers, "tower_shares")
        # Each worker has the same part of a batch, whatever the sum of its towers' shares.
        all_shares = tuple(share / sum(shares) for share in shares) * num_sharing
        split.check_batch_size(task.batch_size, options.accumulation, all_shares)
        self.tower = TowerFunction(
            task,
            model,
            exchange=TowerExchange(len(all_shares))
            if options.batch_stats == "synced" and len(all_shares) > 1
            else None,
            kernels=options.kernels(devices),
            xla=options.xla,
        )
        parts = TowerParts(
            shares=shares,
            first_tower=rank * len(shares) if num_sharing > 1 else 0,
            num_towers=len(all_shares),
            stand_in=None if stand_in is None else tf.nest.map_structure(lambda tensor: tensor.numpy(), stand_in),
        )
        self._passes = TowerPasses(self.tower, devices, parts, options)
        with tf.device(HOST):
            self._counters = Counters.new(loss_scaling_for(options.precision))
        self._wire = WIRE_PRECISIONS[wire_precision]
        self._describe(self.tower.variables)
        self._whole_function = tf.function(self._undivided, autograph=False)
        self._first_function = tf.function(self._first_sums, autograph=False)
        self._more_function = tf.function(self._more_sums, autograph=False)
        self._outputs_function = tf.function(self._outputs, autograph=False)

    def _describe(self, variables: ModelVariables) -> None:
        self.layout = layout_of(variables.parameters, num_servers=1)
        self._state_shapes = [tuple(variable.shape) for variable in variables.state]
        self._state_dtypes = [tf.as_dtype(variable.dtype) for variable in variables.state]
        # Names of the sparse gradients and of the reported sums; known when a graph was traced.
        self._sparse: list[str] = []
        self._reported: list[str] = []

    def compute(self, step: int, parameters: np.ndarray, state: np.ndarray, batches: Sequence[Batch]) -> Computed:
        """One step.

        Args:
          step: index of the step, from which random numbers are derived.
          parameters: all parameters as one vector.
          state: float64, all state as one vector.
          batches: this worker's part of each microbatch.
        """
        self._counters.step.assign(step)
        vector, state = tf.constant(parameters), tf.constant(state)
        out = (
            self._whole_function(vector, state, *batches)
            if len(batches) == 1
            else self._microbatches(vector, state, *batches)
        )
        weight, norm, finite, *sums = out.numbers.numpy().tolist()
        return Computed(
            gradient=self._split(out),
            state_change=out.state_change.numpy(),
            weight=weight,
            sums=dict(zip(self._reported, zip(sums[::2], sums[1::2], strict=True), strict=True)),
            norm=norm,
            finite=bool(finite),
            examples=sum(tf.nest.flatten(batch.features)[0].shape[0] for batch in batches),
        )

    def _microbatches(self, vector, state, first, *others) -> _Outputs:
        sums = self._first_function(vector, state, first)
        for index, batch in enumerate(others, start=1):
            # Some microbatches of a short batch are empty. Workers that share batches take them all the same:
            # a microbatch that is empty here may not be empty elsewhere.
            if self._sends_sums or int(batch_length(batch)) > 0:
                sums = self._more_function(vector, batch, tf.constant(index), sums)
        return self._outputs_function(state, sums)

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
        return self._sums_of(batch, 0, vector, self._state_in(state))

    def _more_sums(self, vector, batch, microbatch_index, sums) -> TowerResult:
        own = self._sums_of(batch, microbatch_index, vector, sums.new_state)
        with tf.device(self._devices.parameters):
            return add_to(sums, own, gradients.add_each)

    def _sums_of(self, batch, microbatch_index, vector, state) -> TowerResult:
        step, loss_scale = self._counters.step.read_value(), self._counters.loss_scale.read_value()
        parameters = self._parameters_in(vector)
        return self._passes.train(batch, microbatch_index, parameters, state, step=step, loss_scale=loss_scale)

    def _outputs(self, state, sums) -> _Outputs:
        with tf.device(self._devices.parameters):
            old = self._state_in(state)
            mean = mean_gradients(sums, self.options, self._counters)
            if self._sends_sums:
                found = [gradients.merged(gradient) for gradient in sums.gradients]
                changes = batch_stats.changes(
                    old,
                    sums.new_state,
                    sums.weight,
                    is_first=self._rank == 0,
                    batch_stats=self.options.batch_stats,
                )
            else:
                found = mean.gradients
                changes = [new - before for new, before in zip(sums.new_state, old, strict=True)]
            dense, rows = self._divided(found)
            reported = {"loss": (sums.loss_sum, sums.weight), **sums.metric_sums}
            self._reported = list(reported)
            numbers = [sums.weight, mean.norm, mean.finite, *(part for pair in reported.values() for part in pair)]
            return _Outputs(
                dense,
                rows,
                _joined([tf.cast(change, tf.float64) for change in changes], tf.float64),
                tf.stack([tf.cast(number, tf.float64) for number in numbers]),
            )

    def _divided(self, found):
        """The dense gradients as one vector, and the rows of each sparse one."""
        names, self._sparse = list(self.layout.shapes), []
        dense, rows = [], []
        for name, gradient in zip(names, found, strict=True):
            shape = self.layout.shapes[name]
            # A row can be sent alone only if the layout never cuts it.
            if isinstance(gradient, tf.IndexedSlices) and len(shape) == 2 and row_width(shape) == shape[1]:
                self._sparse.append(name)
                rows.append((tf.cast(gradient.indices, tf.int64), self._on_wire(gradient.values)))
            else:
                dense.append(self._on_wire(tf.convert_to_tensor(gradient)))
        return _joined(dense, self._wire or found[0].dtype), rows

    def _on_wire(self, values):
        return tf.cast(values, self._wire) if self._wire and values.dtype == tf.float32 else values

    def _parameters_in(self, vector):
        with tf.device(self._devices.parameters):
            shapes = list(self.layout.shapes.values())
            parts = tf.split(vector, [int(np.prod(shape)) for shape in shapes])
            return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def _state_in(self, state):
        if not self._state_shapes:
            return []
        parts = tf.split(state, [int(np.prod(shape)) for shape in self._state_shapes])
        described = zip(parts, self._state_shapes, self._state_dtypes, strict=True)
        return [tf.reshape(tf.cast(part, dtype), shape) for part, shape, dtype in described]


def layout_of(parameters, num_servers: int) -> Layout:
    """The layout of a model's parameters, in the model's order."""
    shapes = [tuple(variable.shape) for variable in parameters]
    return Layout(shapes=dict(zip(canonical_names(parameters), shapes, strict=True)), num_servers=num_servers)


def _joined(tensors, dtype):
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0) if tensors else tf.zeros([0], dtype)
