"""The passes of a model, cut into the pieces of its stages: what `towers.tower` computes on one device."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.errors import UserError
from towers.input.unprepared import with_features
from towers.layers.kernels import LayerKernels
from towers.layers.moving_decays import noted_decays
from towers.pipeline.schedule import Schedule
from towers.recompute.recomputation import Recomputation
from towers.stages.model_stages import ModelStages
from towers.stages.staged_trace import StagedTrace, readings_of, trace
from towers.task import Batch, Task
from towers.tower import (
    EvaluationResult,
    ModelVariables,
    TowerResult,
    check_gradients,
    run_model,
    total_loss,
    weighted_metrics,
)
from towers.tracing.captured_variables import check_captured_variables

_SCALAR, _SEED = tf.TensorSpec([], tf.float32), tf.TensorSpec([2], tf.int32)


class StagedPasses:
    """The training and the evaluation pass of a task's model in pieces, traced once for each spec of a batch.

    Attributes:
      decays: the decay of each state variable, as for `towers.moving_averages.after_all`; known after `training`.
    """

    def __init__(
        self,
        task: Task,
        model: keras.Model,
        stages: ModelStages,
        schedule: Schedule,
        kernels: LayerKernels,
        recompute: str = "none",
        batch_spec: Batch | None = None,
    ):
        """Args:
        task: gives the loss and the metrics.
        model: a built template.
        stages: its stages.
        schedule: a schedule without faults of the tower's devices.
        kernels: which layers use other kernels than Keras's.
        recompute: activations that the backward pass computes again, one of `towers.recompute.segments.POLICIES`.
          A part of the model that lies in several stages is not recomputed.
        batch_spec: as for `towers.tower.TowerFunction`.
        """
        self.variables, self.stages, self.schedule = ModelVariables.of(model), stages, schedule
        self.readings = readings_of(stages, self.variables)
        self._task, self._model, self._kernels, self._batch_spec = task, model, kernels, batch_spec
        self._recomputation = Recomputation(model, recompute)
        self._traces: dict[str, StagedTrace] = {}
        self.decays: Sequence[float | None] = ()

    def training(self, batch: Batch) -> StagedTrace:
        """The pieces of a training pass: arguments and results as of `towers.tower.TowerFunction`.

        Readings take the place of parameters; the gradients are a dict whose keys are indices of readings, as
        text.

        Raises:
          UserError: a layer in several stages changes its state.
        """
        found = self._trace("training", self._train, batch, [_SEED, _SCALAR], self.schedule.is_split)
        self._check_state(found)
        return found

    def evaluation(self, batch: Batch) -> StagedTrace:
        """The pieces of an evaluation pass, as of `towers.tower.EvaluationFunction`."""
        return self._trace("evaluation", self._evaluate, batch, [_SCALAR], False)

    def _trace(self, name, function, batch, scalars, is_split) -> StagedTrace:
        spec = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), batch)
        key = name + repr(spec)
        if key not in self._traces:
            parameters = [_spec_of(self.variables.parameters[reading.parameter]) for reading in self.readings]
            state = [_spec_of(variable) for variable in self.variables.state]
            specs = [parameters, state, spec, *scalars]
            self._traces[key] = trace(function, self.stages, self.variables, specs, is_split=is_split)
        return self._traces[key]

    def _train(self, marks, readings, state, batch, seed, gain):
        batch = with_features(self._task, batch, self._batch_spec)
        active = tf.sign(gain)
        marks.recomputed = traced = self._recomputation.traced_pass()
        with tf.GradientTape(watch_accessed_variables=False) as tape, noted_decays(self._model) as decays:
            tape.watch(readings)
            mapping = self.variables.mapping(self._first(readings), state, seed)
            outputs, losses, new_state = run_model(
                self._model,
                mapping,
                self.variables.state,
                batch,
                True,
                self._kernels,
                None,
                active,
                around_call=traced.forward(),
            )
            loss = self._task.loss(outputs, batch)
            loss_sum = total_loss(loss, losses)
            objective = loss_sum * gain
        check_captured_variables(self._model)
        self.decays = [decays.get(id(variable)) for variable in self.variables.state]
        metrics = weighted_metrics(self._task, outputs, batch, active)
        loss_sum, weight = loss_sum * active, loss.weight * active
        marks.backward = marks.count
        found = traced.gradients(tape, objective, readings)
        self._check_gradients(found)
        self._kernels.place_values()
        # A stage may contain a layer but not read all of its parameters.
        present = {str(index): gradient for index, gradient in enumerate(found) if gradient is not None}
        return TowerResult(loss_sum, weight, present, new_state, metrics)

    def _check_gradients(self, found) -> None:
        of_parameters: dict[int, list] = {}
        for reading, gradient in zip(self.readings, found, strict=True):
            of_parameters.setdefault(reading.parameter, []).append(gradient)
        of_any = [
            next((gradient for gradient in of_parameters.get(index, ()) if gradient is not None), None)
            for index in range(len(self.variables.parameters))
        ]
        check_gradients(self.variables.parameters, of_any)

    def _check_state(self, found: StagedTrace) -> None:
        """Raises UserError if a layer in several stages changes its state, which stays within a stage."""
        for index, after in found.new_state_names().items():
            path, before = self.variables.state[index].path, found.state[index]
            pieces = [piece for piece in found.pieces.values() if before in piece.inputs or after in piece.outputs]
            if len({piece.place.stage for piece in pieces}) > 1:
                raise UserError(
                    f"{path} changes in several stages, because its layer is called in each of them: "
                    "cut the model so that one stage has all calls (balance), or use a layer for each call"
                )

    def _evaluate(self, marks, readings, state, batch, gain):
        batch = with_features(self._task, batch)
        mapping = self.variables.mapping(self._first(readings), state, tf.zeros([2], tf.int32))
        outputs, losses, _ = run_model(self._model, mapping, (), batch, False, self._kernels)
        loss = self._task.loss(outputs, batch)
        metrics = weighted_metrics(self._task, outputs, batch, gain)
        return EvaluationResult(total_loss(loss, losses) * gain, loss.weight * gain, metrics)

    def _first(self, readings):
        """For each parameter the value that its first stage reads."""
        found = {}
        for reading, value in zip(self.readings, readings, strict=True):
            found.setdefault(reading.parameter, value)
        return list(found.values())


def _spec_of(variable) -> tf.TensorSpec:
    return tf.TensorSpec(variable.shape, variable.dtype)
