"""The tower: one copy of the computation, as a pure function.

    tower(parameters, state, batch, seed, gain) -> TowerResult

Forward, loss and backward on a part of the batch. It owns no variable: parameters and state (for example the
moving statistics of batch norm) come in as tensors; gradients and new state go out as tensors. So it is traced
once and called once for each tower, on that tower's device, wherever the parameters live.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.errors import UserError
from towers.exchange import TowerExchange
from towers.input.unprepared import with_features
from towers.layers.kernels import DEFAULT_KERNELS, LayerKernels
from towers.layers.shadowing import shadowed
from towers.layers.table_rows import TableRows, layers_of_tables, lookups_in_rows
from towers.moving_averages import Microbatches
from towers.per_tower import PerTower
from towers.recompute.recomputation import Recomputation
from towers.task import Batch, Task, WeightedValue
from towers.timeline.activities import BACKWARD_SCOPE
from towers.tower_scope import TowerScope, is_seed
from towers.tracing.captured_variables import check_captured_variables
from towers.tracing.drawn_numbers import drawn_by_tensorflow
from towers.tracing.traced_once import TracedOnce


class TowerResult(NamedTuple):
    """The result of one tower. Sums, not means: they add up over towers, whatever the sizes of the parts.

    Attributes:
      loss_sum: float32 scalar, SUM of the losses plus weight * (sum of the regularisation losses).
      weight: float32 scalar, number of examples (or valid tokens) in the sum; 0 for an idle tower.
      gradients: gradients of gain * loss_sum, one tensor or IndexedSlices for each parameter; only a part of this
        list if other processes have the rest (`towers.gathering.gathered_once`).
      new_state: by index in the model's state, the variables that the pass changes. The others, such as frozen
        weights, keep their values; nothing is computed or sent for them.
      metric_sums: undivided metrics by name.
      microbatches: what each microbatch adds to moving statistics, if a tower computes several in one call; () for
        other towers, and for sums.
    """

    loss_sum: tf.Tensor
    weight: tf.Tensor
    gradients: list[tf.Tensor | tf.IndexedSlices]
    new_state: Mapping[int, tf.Tensor]
    metric_sums: Mapping[str, WeightedValue]
    microbatches: Microbatches | tuple[()] = ()


class EvaluationResult(NamedTuple):
    """Undivided loss and metrics of some examples, without training on them."""

    loss_sum: tf.Tensor
    weight: tf.Tensor
    metric_sums: Mapping[str, WeightedValue]


@dataclasses.dataclass(frozen=True)
class ModelVariables:
    """A model's variables by what a tower does with them, each kind in the model's own order.

    Attributes:
      parameters: trained by gradients.
      state: changed by the forward pass, or constant (moving statistics, frozen weights).
      seeds: states of random generators (dropout). Each step sets them; checkpoints do not hold them.
      frozen: ascending indices in `state` of weights that their layers created as trainable. No pass of Keras's
        layers changes them.
    """

    parameters: tuple[keras.Variable, ...]
    state: tuple[keras.Variable, ...]
    seeds: tuple[keras.Variable, ...]
    frozen: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: keras.Model) -> "ModelVariables":
        """Sorts the variables of a built model.

        Raises:
          UserError: the model is not built, or has no trainable variable.
        """
        if not model.built:
            raise UserError(
                f"model {model.name!r} is not built: call it once on an example, or give its inputs a shape"
            )
        if not model.trainable_variables:
            raise UserError(f"model {model.name!r} has no trainable variables: set trainable=True on a layer")
        rest = model.non_trainable_variables
        state = tuple(variable for variable in rest if not is_seed(variable))
        return cls(
            parameters=tuple(model.trainable_variables),
            state=state,
            seeds=tuple(variable for variable in rest if is_seed(variable)),
            frozen=_frozen(model, state),
        )

    @property
    def moving(self) -> tuple[int, ...]:
        """Ascending indices in `state` of the variables that a pass may change."""
        return tuple(index for index in range(len(self.state)) if index not in self.frozen)

    def mapping(self, parameters, state, seed):
        """Pairs (variable, tensor) for a `TowerScope`; none for a table of which only rows are given."""
        described = zip(self.parameters, parameters, strict=True)
        whole = [(variable, value) for variable, value in described if not isinstance(value, TableRows)]
        pairs = [*whole, *zip(self.state, state, strict=True)]
        for index, variable in enumerate(self.seeds):
            folded = tf.random.experimental.stateless_fold_in(seed, index)
            pairs.append((variable, tf.cast(folded, variable.dtype)))
        return pairs


def _frozen(model: keras.Model, state: Sequence[keras.Variable]) -> tuple[int, ...]:
    """As `ModelVariables.frozen`."""
    weights = {id(weight) for layer in model._flatten_layers() for weight in layer._trainable_variables}
    return tuple(index for index, variable in enumerate(state) if id(variable) in weights)


class TowerFunction:
    """The training pass of a task's model, traced once for batches of any length."""

    def __init__(
        self,
        task: Task,
        model: keras.Model,
        *,
        exchange: TowerExchange | None = None,
        kernels: LayerKernels = DEFAULT_KERNELS,
        xla: bool = False,
        traced: Callable = TracedOnce,
        recompute: str = "none",
        batch_spec: Batch | None = None,
    ):
        """Args:
        task: gives the loss and the metrics.
        model: a built template; its variables are never read or written by the tower.
        exchange: sums batch statistics over all towers; None for the statistics of the tower's own examples.
        kernels: which layers use other kernels than Keras's.
        xla: compile the tower (and nothing else) with XLA.
        traced: makes the graph that is called on each device, as `TracedOnce` does.
        recompute: activations that the backward pass computes again, one of `towers.recompute.segments.POLICIES`.
        batch_spec: spec with the dtypes of the task's batches, some of which `towers.input.wide_integers` may have
          changed on the way to the tower; None to keep the dtypes that arrive.

        Raises:
          UserError: `xla` with an exchange: XLA cannot compile an exchange on every device; or a model without
            parts to compute again.
        """
        if xla and exchange is not None:
            raise UserError(
                "xla=True with batch_stats='synced': XLA cannot compile the exchange of statistics; "
                "use batch_stats='average'"
            )
        self.model = model
        self.variables = ModelVariables.of(model)
        self._task, self._batch_spec = task, batch_spec
        self.exchange = exchange
        self._kernels = kernels
        self.num_traces = 0
        self._recomputation = Recomputation(model, recompute)
        change = self._recomputation.change if self._recomputation.segments else None
        train = drawn_by_tensorflow()(self._train) if xla else self._train
        self.traced = traced(train, xla=xla, change=change)

    def __call__(self, parameters, state, batch: Batch, seed, gain) -> TowerResult:
        """One pass.

        Args:
          parameters, state: one tensor for each variable, in the order of `self.variables`. A parameter may be
            `Slices`, which are joined on the current device. One that `towers.lookups.Lookups` found to be a table
            may be `TableRows`; its gradient is IndexedSlices.
          batch: the tower's part, at least one example.
          seed: int32 [2], for dropout and other random layers.
          gain: float32 scalar that multiplies the loss before differentiation: 1, a loss scale, or 0 for a tower
            that is idle in this step (it computes some example of the batch, and its result is multiplied by 0).
        """
        result = self.traced(list(parameters), list(state), batch, seed, gain)
        for variable, gradient in zip(self.variables.parameters, result.gradients, strict=True):
            # TensorFlow does not know the shape for a table that is read by lookups and otherwise (tied weights).
            for of_tower in gradient.values if isinstance(gradient, PerTower) else [gradient]:
                if isinstance(of_tower, tf.Tensor):
                    of_tower.set_shape(variable.shape)
        return result

    def _train(self, parameters, state, batch, seed, gain):
        self.num_traces += 1
        batch = with_features(self._task, batch, self._batch_spec)
        active = tf.sign(gain)
        traced = self._recomputation.traced_pass()
        watched = [value.values if isinstance(value, TableRows) else value for value in parameters]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            # Keras reads the watched tensors through the mapping.
            outputs, losses, new_state = self._forward(parameters, state, batch, seed, active, traced)
            loss = self._task.loss(outputs, batch)
            loss_sum = total_loss(loss, losses)
            objective = loss_sum * gain
        check_captured_variables(self.model)
        with tf.name_scope(BACKWARD_SCOPE):
            gradients = self._gradients(parameters, traced.gradients(tape, objective, watched))
        metrics = weighted_metrics(self._task, outputs, batch, active)
        result = TowerResult(loss_sum * active, loss.weight * active, gradients, new_state, metrics)
        self._kernels.place_values()
        return result if self.exchange is None else self.exchange.when_all_are_done(result)

    def _forward(self, parameters, state, batch, seed, active, traced):
        mapping = self.variables.mapping(parameters, state, seed)
        layers = layers_of_tables(self.model)
        described = zip(self.variables.parameters, parameters, strict=True)
        rows = {layers[variable.path]: value for variable, value in described if isinstance(value, TableRows)}
        with shadowed(lookups_in_rows(rows)):
            return run_model(
                self.model,
                mapping,
                self.variables.state,
                batch,
                True,
                self._kernels,
                self.exchange,
                active,
                around_call=traced.forward(),
            )

    def _gradients(self, parameters, found):
        """The parameters' gradients, from those of their values (a table's may be rows only)."""
        variables = self.variables.parameters
        check_gradients(variables, found)
        return [
            value.gradient(gradient, variable.shape[0]) if isinstance(value, TableRows) else gradient
            for variable, value, gradient in zip(variables, parameters, found, strict=True)
        ]


class EvaluationFunction:
    """The evaluation pass of a task's model: no gradients, no new state, dropout off."""

    def __init__(
        self,
        task: Task,
        model: keras.Model,
        *,
        kernels: LayerKernels = DEFAULT_KERNELS,
        traced: Callable = TracedOnce,
    ):
        self._task, self._model, self._kernels = task, model, kernels
        self._variables = ModelVariables.of(model)
        self.traced = traced(self._evaluate)

    def __call__(self, parameters, state, batch: Batch, gain) -> EvaluationResult:
        """Arguments as for `TowerFunction`."""
        return self.traced(list(parameters), list(state), batch, gain)

    def _evaluate(self, parameters, state, batch, gain):
        batch = with_features(self._task, batch)
        mapping = self._variables.mapping(parameters, state, tf.zeros([2], tf.int32))
        outputs, losses, _ = run_model(self._model, mapping, (), batch, False, self._kernels)
        loss = self._task.loss(outputs, batch)
        metrics = weighted_metrics(self._task, outputs, batch, gain)
        self._kernels.place_values()
        return EvaluationResult(total_loss(loss, losses) * gain, loss.weight * gain, metrics)


def run_model(
    model,
    mapping,
    state,
    batch,
    training,
    kernels: LayerKernels,
    exchange=None,
    weight=None,
    around_call=None,
) -> tuple[Any, list, dict[int, tf.Tensor]]:
    """The model's outputs, its regularisation losses, and by index the new values of `state` that it changes.

    `around_call` is a context manager, or None, that is entered after the kernels are in place. Keras's own
    `stateless_call` would skip what `Layer.__call__` does: masks, casts, the `training` argument.

    Raises:
      UserError: a layer makes an assignment that `TowerScope` refuses.
    """
    with TowerScope(mapping, model) as scope:
        before = [scope.get_current_value(variable) for variable in state]
        with kernels.in_place(model, exchange, weight), around_call or contextlib.nullcontext():
            outputs = model(batch.features, training=training)
        losses = list(model.losses)
        after = [scope.get_current_value(variable) for variable in state]
    new_state = {
        index: tf.convert_to_tensor(new)
        for index, (old, new) in enumerate(zip(before, after, strict=True))
        if new is not old
    }
    return outputs, losses, new_state


def weighted_metrics(task: Task, outputs, batch: Batch, factor: tf.Tensor) -> dict[str, WeightedValue]:
    """The task's undivided metrics, multiplied by `factor` (0 for a tower that is idle)."""
    return {
        name: WeightedValue(value.total * factor, value.weight * factor)
        for name, value in task.metrics(outputs, batch).items()
    }


def check_gradients(variables: Sequence[keras.Variable], found: Sequence) -> None:
    """Raises UserError if a parameter has no gradient."""
    missing = [variable.path for variable, gradient in zip(variables, found, strict=True) if gradient is None]
    if missing:
        raise UserError(
            f"no gradient for parameter {', '.join(missing)}: the loss does not depend on it; use it in the "
            "outputs, or set trainable=False on its layer"
        )


def total_loss(loss, regularization_losses: Sequence[tf.Tensor]) -> tf.Tensor:
    """loss.total + loss.weight * (sum of the regularisation losses), a float32 scalar.

    The division by the weight, after all towers are summed, gives mean loss + regularisation losses.
    """
    total = tf.cast(loss.total, tf.float32)
    if regularization_losses:
        total += loss.weight * tf.cast(
            tf.add_n([tf.cast(r, tf.float32) for r in regularization_losses]), tf.float32
        )
    return total
