"""The graph of a worker's step: all parameters in as one vector, one gradient vector out. It owns no variable."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from strategies.servers.layout import Layout, row_width
from strategies.wire_precisions import WIRE_PRECISIONS
from towers import batch_stats, gradients, split
from towers.devices import Devices
from towers.exchange import TowerExchange
from towers.mean_and_update import mean_gradients
from towers.options import StepOptions
from towers.placement import canonical_names
from towers.sums import add_to
from towers.task import Batch, Task
from towers.tower import ModelVariables, TowerFunction, TowerResult
from towers.tower_parts import TowerParts
from towers.tower_passes import TowerPasses

# Servers refuse float16, the only precision that scales the loss.
_LOSS_SCALE = 1.0


class Outputs(NamedTuple):
    """What a step's graph returns.

    Attributes:
      dense: the gradients that are not sparse, as one vector in the wire's precision.
      rows: (indices, values) of each sparse gradient.
      state_change: float64 [all state].
      numbers: float64 vector: weight, norm of the mean gradient, whether all is finite, and a (total, weight) pair
        for each name in `WorkerGraph.reported`.
    """

    dense: tf.Tensor
    rows: Sequence[tuple[tf.Tensor, tf.Tensor]]
    state_change: tf.Tensor
    numbers: tf.Tensor


class WorkerGraph:
    """The towers of a worker as functions of tensors.

    Attributes:
      options: options of the step.
      tower: the training pass.
      layout: where each parameter is in the vector.
      has_collectives: whether its towers exchange statistics within a pass.
      sparse: names of the parameters with sparse gradients; known when `outputs` was traced.
      reported: names of the reported sums; known when `outputs` was traced.
    """

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
        sends_rows: bool = True,
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
        sends_rows: whether sparse gradients are sent as rows.
        stand_in: a batch of one example, for a worker whose part of a batch is empty; None if none ever is.
        wire_precision: number format of the gradients that are sent, a key of WIRE_PRECISIONS.

        Raises:
          UserError: shares that don't fit the towers, or a batch too small for all towers.
        """
        self.options = options
        self._devices, self._rank = devices, rank
        self._sends_sums, self._sends_rows = sends_sums, sends_rows
        shares = split.checked_shares(shares, devices.num_towers, "tower_shares")
        # Each worker has the same part of a batch, whatever the sum of its towers' shares.
        all_shares = tuple(share / sum(shares) for share in shares) * num_sharing
        split.check_batch_size(task.batch_size, options.accumulation, all_shares)
        self.has_collectives = options.batch_stats == "synced" and len(all_shares) > 1
        self.tower = TowerFunction(
            task,
            model,
            exchange=TowerExchange(len(all_shares)) if self.has_collectives else None,
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
        self._wire = WIRE_PRECISIONS[wire_precision]
        self._describe(self.tower.variables)

    def _describe(self, variables: ModelVariables) -> None:
        self.layout = layout_of(variables.parameters, num_servers=1)
        self._state_shapes = [tuple(variable.shape) for variable in variables.state]
        self._state_dtypes = [tf.as_dtype(variable.dtype) for variable in variables.state]
        # Names of the sparse gradients and of the reported sums; known when a graph was traced.
        self.sparse: list[str] = []
        self.reported: list[str] = []

    def whole(self, vector: tf.Tensor, state: tf.Tensor, step: tf.Tensor, batch: Batch) -> Outputs:
        """A step on one undivided batch.

        Args:
          vector: all parameters.
          state: float64, all state.
          step: int64 scalar, from which random numbers are derived.
          batch: what this worker computes.
        """
        return self.outputs(state, self.first_sums(vector, state, step, batch))

    def first_sums(self, vector, state, step, batch) -> TowerResult:
        """The sums over microbatch 0; arguments as for `whole`."""
        return self._sums_of(batch, 0, vector, self._state_in(state), step)

    def more_sums(self, vector, step, batch, microbatch_index, sums) -> TowerResult:
        """`sums` plus those over another microbatch."""
        own = self._sums_of(batch, microbatch_index, vector, sums.new_state, step)
        with tf.device(self._devices.parameters):
            return add_to(sums, own, gradients.add_each)

    def _sums_of(self, batch, microbatch_index, vector, state, step) -> TowerResult:
        parameters = self._parameters_in(vector)
        return self._passes.train(
            batch, microbatch_index, parameters, state, step=step, loss_scale=tf.constant(_LOSS_SCALE)
        )

    def outputs(self, state: tf.Tensor, sums: TowerResult) -> Outputs:
        """What is sent, from the sums over all microbatches."""
        with tf.device(self._devices.parameters):
            old = self._state_in(state)
            mean = mean_gradients(sums, self.options, tf.constant(_LOSS_SCALE))
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
            self.reported = list(reported)
            numbers = [sums.weight, mean.norm, mean.finite, *(part for pair in reported.values() for part in pair)]
            return Outputs(
                dense,
                rows,
                _joined([tf.cast(change, tf.float64) for change in changes], tf.float64),
                tf.stack([tf.cast(number, tf.float64) for number in numbers]),
            )

    def _divided(self, found):
        """The dense gradients as one vector, and the rows of each sparse one."""
        names, self.sparse = list(self.layout.shapes), []
        dense, rows = [], []
        for name, gradient in zip(names, found, strict=True):
            shape = self.layout.shapes[name]
            # A row can be sent alone only if the layout never cuts it.
            is_sparse = self._sends_rows and isinstance(gradient, tf.IndexedSlices)
            if is_sparse and len(shape) == 2 and row_width(shape) == shape[1]:
                self.sparse.append(name)
                rows.append((tf.cast(gradient.indices, tf.int64), self._on_wire(gradient.values)))
            else:
                dense.append(self._on_wire(tf.convert_to_tensor(gradient)))
        return _joined(dense, self._wire or found[0].dtype), rows

    def wire_dtype(self, dtype: tf.DType) -> tf.DType:
        """The dtype in which gradients of `dtype` are sent."""
        return self._wire if self._wire and dtype == tf.float32 else dtype

    def _on_wire(self, values):
        return tf.cast(values, self.wire_dtype(values.dtype))

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
