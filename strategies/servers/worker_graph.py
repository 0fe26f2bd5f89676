"""The graph of a worker's step, from a vector and rows of tables to their gradients. It owns no variable."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from strategies.servers.tables import ParameterLayout
from strategies.wire_precisions import WIRE_PRECISIONS
from towers import batch_stats, gradients, split
from towers.devices import Devices
from towers.errors import UserError
from towers.exchange import TowerExchange
from towers.input.tower_parts import TowerParts
from towers.layers.batch_norm.calls import check_synchronized
from towers.layers.table_rows import TableRows
from towers.lookups import Lookups
from towers.mean_and_update import mean_gradients
from towers.options import StepOptions
from towers.parameters.placement import canonical_names
from towers.sums import add_to
from towers.task import Batch, Task
from towers.tower import ModelVariables, TowerFunction, TowerResult
from towers.tower_passes import TowerPasses
from towers.updates.rules import UpdateRule

# Servers do not support float16, the only precision that scales the loss.
_LOSS_SCALE = 1.0


class StepValues(NamedTuple):
    """The inputs of a step, besides its batch.

    Attributes:
      vector: all parameters that are not tables.
      rows: for each matrix of tables, the rows that `WorkerGraph.wanted` names.
      state: all state except the frozen weights, as one vector.
      frozen: each frozen weight, in the model's order.
    """

    vector: tf.Tensor
    rows: Sequence[TableRows]
    state: tf.Tensor
    frozen: Sequence[tf.Tensor]


class Outputs(NamedTuple):
    """The outputs of a step's graph.

    Attributes:
      dense: the gradients of the parameters that are not tables, as one vector in the wire's precision.
      rows: the gradients of each matrix of tables, each row once, in the wire's precision.
      state_change: float64, the change of all state except the frozen weights.
      numbers: float64 vector: weight, norm of the mean gradient, whether all is finite, and a (total, weight) pair
        for each name in `WorkerGraph.reported`.
    """

    dense: tf.Tensor
    rows: Sequence[TableRows]
    state_change: tf.Tensor
    numbers: tf.Tensor


class WorkerGraph:
    """The towers of a worker as functions of tensors.

    Attributes:
      options: options of the step.
      tower: the training pass.
      layout: where each parameter is on the servers: in the vector, or in a matrix of tables.
      has_collectives: whether its towers exchange statistics within a pass.
      reported: names of the reported sums; known once `outputs` was traced.
    """

    def __init__(
        self,
        task: Task,
        model: keras.Model,
        devices: Devices,
        options: StepOptions,
        lookups: Lookups,
        *,
        shares: Sequence[float] | None = None,
        num_servers: int,
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
        lookups: the tables of the model that are pulled by rows.
        shares: relative sizes of the towers' parts; None for equal parts.
        num_servers: number of servers that hold the parameters.
        num_sharing: number of parts into which workers divide a batch; 1 if each worker computes whole batches.
        sends_sums: whether servers average the gradients of several workers, so that workers send SUMs.
        stand_in: a batch of one example, for a worker whose part of a batch is empty; None if parts are never
          empty.
        wire_precision: number format of the gradients that are sent, a key of WIRE_PRECISIONS.

        Raises:
          UserError: shares don't fit the towers, or the batch is too small for all towers.
        """
        self.options = options
        self._devices, self._sends_sums = devices, sends_sums
        shares = split.checked_shares(shares, devices.num_towers, "tower_shares")
        # All parts of a batch are equal, whatever the sum of the towers' shares.
        all_shares = tuple(share / sum(shares) for share in shares) * num_sharing
        given = split.given_shares("tower_shares", shares)
        split.check_batch_size(task.batch_size, options.accumulation, all_shares, len(shares), given)
        check_synchronized(model, batch_stats=options.batch_stats, num_towers=len(all_shares))
        self.has_collectives = options.batch_stats == "synced" and len(all_shares) > 1
        self.tower = TowerFunction(
            task,
            model,
            exchange=TowerExchange(len(all_shares)) if self.has_collectives else None,
            kernels=options.kernels(
                devices, split.fewest_examples(task.batch_size, options.accumulation, all_shares)
            ),
            xla=options.xla,
            recompute=options.recompute,
        )
        self._stand_in = (
            None if stand_in is None else tf.nest.map_structure(lambda tensor: tensor.numpy(), stand_in)
        )
        self._tower_parts = TowerParts(shares=shares, all_shares=all_shares, stand_in=self._stand_in)
        self._wire = WIRE_PRECISIONS[wire_precision]
        self._lookups = lookups
        self.layout = layout_of(self.tower.variables, lookups, options.rule, num_servers=num_servers)
        self._describe(self.tower.variables)

    def _describe(self, variables: ModelVariables) -> None:
        self._state = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables.state]
        self._frozen, self._moving = variables.frozen, variables.moving
        # Names of the reported sums; known once a graph was traced.
        self.reported: list[str] = []

    def wanted(self, *batches: Batch) -> list[tf.Tensor]:
        """The rows of each matrix of tables that a step's microbatches need: int64 [n], ascending, each once."""
        stand_in = [] if self._stand_in is None else [self._stand_in]
        found = [self._lookups.ids(batch) for batch in (*batches, *stand_in)]
        ids = {name: tf.concat([one[name] for one in found], 0) for name in self._lookups.heights}
        return [table.wanted(ids) for table in self.layout.tables]

    def whole(self, values: StepValues, step: tf.Tensor, part: tf.Tensor | int, batch: Batch) -> Outputs:
        """A step on one undivided batch.

        Args:
          values: values of parameters and state.
          step: int64 scalar, from which random numbers are derived.
          part: int32 scalar, index of the part if workers divide the batch, else 0. Random numbers are derived
            from the part too, so they do not depend on which worker computes it.
          batch: the part.
        """
        return self.outputs(values, part, self.first_sums(values, step, part, batch))

    def first_sums(self, values: StepValues, step, part, batch) -> TowerResult:
        """The sums over microbatch 0; arguments as for `whole`."""
        return self._sums_of(batch, 0, self._parameters_in(values), self._state_in(values), step, part)

    def more_sums(self, values: StepValues, step, part, batch, microbatch_index, sums) -> TowerResult:
        """`sums` plus those over another microbatch."""
        state = batch_stats.after(self._state_in(values), sums.new_state)
        own = self._sums_of(batch, microbatch_index, self._parameters_in(values), state, step, part)
        with tf.device(self._devices.parameters):
            return add_to(sums, own, gradients.add_each)

    def _sums_of(self, batch, microbatch_index, parameters, state, step, part) -> TowerResult:
        parts = dataclasses.replace(self._tower_parts, first_tower=part * len(self._tower_parts.shares))
        passes = TowerPasses([self.tower] * self._devices.num_towers, self._devices, parts, self.options)
        sums = passes.train(
            batch, microbatch_index, parameters, state, step=step, loss_scale=tf.constant(_LOSS_SCALE)
        )
        self._check_frozen(sums.new_state)
        return sums

    def _check_frozen(self, changed: Mapping[int, tf.Tensor]) -> None:
        """Raises UserError if a pass changes frozen weights: workers pull these only once."""
        named = [self.tower.variables.state[index].path for index in self._frozen if index in changed]
        if named:
            raise UserError(
                f"frozen weight {', '.join(named)} is assigned in a layer's call with strategy=ps: workers pull "
                "frozen weights once; make it with add_weight(trainable=False), or use another strategy"
            )

    def outputs(self, values: StepValues, part: tf.Tensor | int, sums: TowerResult) -> Outputs:
        """The outputs to send, from the sums over all microbatches."""
        with tf.device(self._devices.parameters):
            old = self._state_in(values)
            mean = mean_gradients(sums, self.options, tf.constant(_LOSS_SCALE))
            if self._sends_sums:
                found = [gradients.merged(gradient) for gradient in sums.gradients]
                changes = batch_stats.changes(
                    old,
                    sums.new_state,
                    sums.weight,
                    is_first=tf.equal(part, 0),
                    batch_stats=self.options.batch_stats,
                )
            else:
                found = mean.gradients
                changes = {index: batch_stats.change(old[index], new) for index, new in sums.new_state.items()}
            dense, rows = self._divided(found)
            reported = {"loss": (sums.loss_sum, sums.weight), **sums.metric_sums}
            self.reported = list(reported)
            numbers = [sums.weight, mean.norm, mean.finite, *(part for pair in reported.values() for part in pair)]
            return Outputs(
                dense,
                rows,
                self._state_vector(changes),
                tf.stack([tf.cast(number, tf.float64) for number in numbers]),
            )

    def _divided(self, found):
        """The gradients of the vector, and those of the matrices of tables."""
        by_name = dict(zip(self.layout.names, found, strict=True))
        dense = [self._on_wire(tf.convert_to_tensor(by_name[name])) for name in self.layout.vector.shapes]
        rows = [table.of_matrix(by_name) for table in self.layout.tables]
        wired = [TableRows(ids, self._on_wire(values)) for ids, values in rows]
        return _joined(dense, self.wire_dtype(found[0].dtype)), wired

    def wire_dtype(self, dtype: tf.DType) -> tf.DType:
        """The dtype in which gradients of `dtype` are sent."""
        return self._wire if self._wire and dtype == tf.float32 else dtype

    def _on_wire(self, values):
        return tf.cast(values, self.wire_dtype(values.dtype))

    def _parameters_in(self, values: StepValues):
        """The parameters in the model's order, tables as their rows."""
        layout = self.layout
        with tf.device(self._devices.parameters):
            shapes = layout.vector.shapes
            parts = tf.split(values.vector, [int(np.prod(shape)) for shape in shapes.values()]) if shapes else []
            named = zip(parts, shapes.items(), strict=True)
            found = {name: tf.reshape(part, shape) for part, (name, shape) in named}
            for table, of_matrix in zip(layout.tables, values.rows, strict=True):
                found |= table.by_table(of_matrix)
            return [found[name] for name in layout.names]

    def _state_vector(self, changes: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """The state's change as a float64 vector without frozen weights; zeros for state that does not change."""
        return _joined(
            [
                tf.cast(changes[index], tf.float64)
                if index in changes
                else tf.zeros(self._state[index].shape, tf.float64)
                for index in self._moving
            ],
            tf.float64,
        )

    def _state_in(self, values: StepValues) -> list[tf.Tensor]:
        """All state, in the model's order."""
        found = dict(zip(self._frozen, values.frozen, strict=True))
        if self._moving:
            sizes = [self._state[index].shape.num_elements() for index in self._moving]
            for index, part in zip(self._moving, tf.split(values.state, sizes), strict=True):
                spec = self._state[index]
                found[index] = tf.reshape(tf.cast(part, spec.dtype), spec.shape)
        return [found[index] for index in range(len(self._state))]


def layout_of(
    variables: ModelVariables, lookups: Lookups, rule: UpdateRule, *, num_servers: int
) -> ParameterLayout:
    """The layout of a model's parameters."""
    shapes = [tuple(variable.shape) for variable in variables.parameters]
    return ParameterLayout.of(
        dict(zip(canonical_names(variables.parameters), shapes, strict=True)),
        lookups.heights,
        decays=rule.decays,
        num_servers=num_servers,
    )


def _joined(tensors, dtype):
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0) if tensors else tf.zeros([0], dtype)
