"""A tower whose layers are divided over several devices: the same pure function as `towers.tower`, in one graph.

                    first device          second device
Dense, columns      x kernel[:, :half]    x kernel[:, half:]
Dense, rows         y += own part         y += own part       summed on the first
everything else     here
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from towers.exchange import TowerExchange
from towers.input.unprepared import with_features
from towers.layers.kernels import LayerKernels
from towers.layers.shadowing import shadowed
from towers.owners import Slices
from towers.recompute.recomputation import Recomputation
from towers.slices.layout import Layout
from towers.slices.sliced_calls import sliced_calls
from towers.slices.sliced_values import SlicedValues
from towers.task import Batch, Task
from towers.timeline.activities import BACKWARD_SCOPE
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
from towers.tracing.traced_once import TracedOnce, specs_of


class _SlicedModel:
    """A model's passes over slices of its parameters."""

    def __init__(self, model: keras.Model, layout: Layout, devices: Sequence[str], kernels: LayerKernels):
        self.variables, self.layout, self.devices = ModelVariables.of(model), layout, tuple(devices)
        self.template, self.kernels = model, kernels

    def run(self, values: SlicedValues, state, seed, batch, training, *others, **options):
        """As `towers.tower.run_model`."""
        mapping = self.variables.mapping(values.whole_values(), state, seed)
        kept = self.variables.state if training else ()
        with shadowed(sliced_calls(self.template, self.layout, values)):
            return run_model(self.template, mapping, kept, batch, training, self.kernels, *others, **options)


class SlicedTower:
    """The training pass of a task's model on the devices of one tower; called as a `TowerFunction`."""

    def __init__(
        self,
        task: Task,
        model: keras.Model,
        layout: Layout,
        devices: Sequence[str],
        *,
        exchange: TowerExchange | None = None,
        kernels: LayerKernels,
        recompute: str = "none",
        batch_spec: Batch | None = None,
        traced: Callable = TracedOnce,
    ):
        """Args:
        task: gives the loss and the metrics.
        model: a built template.
        layout: how its layers are split.
        devices: the device of each slice; the first one computes all that is not split.
        exchange: sums batch statistics over all towers; None for the statistics of the tower's own examples.
        kernels: which layers use other kernels than Keras's.
        recompute: activations that the backward pass computes again, one of `towers.recompute.segments.POLICIES`.
        batch_spec: as for `TowerFunction`.
        traced: makes the graph, as `TracedOnce` does.
        """
        self._task, self._layout, self._exchange, self._batch_spec = task, layout, exchange, batch_spec
        self._model = _SlicedModel(model, layout, devices, kernels)
        self._recomputation = Recomputation(model, recompute)
        change = self._recomputation.change if self._recomputation.segments else None
        self.traced = traced(self._train, change=change)

    def __call__(self, parameters, state, batch: Batch, seed, gain) -> TowerResult:
        """One pass.

        Args:
          parameters: for each parameter `Slices` as the layout cuts it, or a tensor; gradients have the same form.
            If `traced` gathers, each slice or tensor may be `Slices` over its owners, or an `OwnPart`, whose
            gradient is then as from `GatheredOnce`.
          state, batch, seed, gain: as for `TowerFunction`.
        """
        held = _held(parameters, self._layout)
        result = self.traced(held, list(state), batch, seed, gain)
        for gradient, given in zip(result.gradients, held, strict=True):
            if isinstance(gradient, tf.Tensor):
                gradient.set_shape(specs_of(given).shape)
        return result._replace(gradients=_sliced(result.gradients, self._layout))

    def _train(self, held, state, batch, seed, gain):
        batch = with_features(self._task, batch, self._batch_spec)
        parameters = [value.parts if isinstance(value, Slices) else value for value in _sliced(held, self._layout)]
        active = tf.sign(gain)
        traced = self._recomputation.traced_pass()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            values = SlicedValues(parameters, self._layout, self._model.devices, tape)
            outputs, losses, new_state = self._model.run(
                values, state, seed, batch, True, self._exchange, active, around_call=traced.forward()
            )
            loss = self._task.loss(outputs, batch)
            loss_sum = total_loss(loss, losses)
            objective = loss_sum * gain
        check_captured_variables(self._model.template)
        with tf.name_scope(BACKWARD_SCOPE):
            gradients = values.gradients_of(objective, traced)
        check_gradients(self._model.variables.parameters, gradients)
        metrics = weighted_metrics(self._task, outputs, batch, active)
        self._model.kernels.place_values()
        # For each parameter a list with one gradient for each slice.
        flat = [
            part for gradient in gradients for part in (gradient if isinstance(gradient, list) else [gradient])
        ]
        return TowerResult(loss_sum * active, loss.weight * active, flat, new_state, metrics)


class SlicedEvaluation:
    """The evaluation pass on the devices of one tower; called as an `EvaluationFunction`."""

    def __init__(
        self,
        task: Task,
        model: keras.Model,
        layout: Layout,
        devices: Sequence[str],
        *,
        kernels: LayerKernels,
        traced: Callable = TracedOnce,
    ):
        """Arguments as for `SlicedTower`."""
        self._task, self._layout = task, layout
        self._model = _SlicedModel(model, layout, devices, kernels)
        self.traced = traced(self._evaluate)

    def __call__(self, parameters, state, batch: Batch, gain) -> EvaluationResult:
        """Arguments as for `SlicedTower`."""
        return self.traced(_held(parameters, self._layout), list(state), batch, gain)

    def _evaluate(self, held, state, batch, gain):
        batch = with_features(self._task, batch)
        parameters = [value.parts if isinstance(value, Slices) else value for value in _sliced(held, self._layout)]
        values = SlicedValues(parameters, self._layout, self._model.devices)
        outputs, losses, _ = self._model.run(values, state, tf.zeros([2], tf.int32), batch, False)
        loss = self._task.loss(outputs, batch)
        metrics = weighted_metrics(self._task, outputs, batch, gain)
        return EvaluationResult(total_loss(loss, losses) * gain, loss.weight * gain, metrics)


def _held(parameters: Sequence, layout: Layout) -> list:
    """A flat list of what the devices hold: the slices of each sliced parameter, and the whole parameters."""
    return [
        part
        for index, value in enumerate(parameters)
        for part in (value.parts if index in layout.cuts else [value])
    ]


def _sliced(held: Sequence, layout: Layout) -> list:
    """For each parameter, from this flat list, its `Slices`, or the whole value."""
    left, found = iter(held), []
    for index in range(len(layout.names)):
        if index in layout.cuts:
            dimension, lengths = layout.cuts[index]
            found.append(Slices([next(left) for _ in lengths], dimension))
        else:
            found.append(next(left))
    return found
