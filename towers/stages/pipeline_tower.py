r"""A tower of several devices, each with one or several stages of the model, which microbatches pass through.

    device 0  F0 F1  .  . B0 F2 B1 F3 B2  . B3       in the order of the schedule
    device 1   . F0 B0 F1 B1 F2 B2 F3 B3  .  .

All is one graph. A device starts an action when its previous action has ended and all inputs have arrived; tensors
are sent while devices compute. Gradients are summed where they are computed, and sent at the end.
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from towers import gradients, sums
from towers.moving_averages import Microbatches
from towers.owners import whole
from towers.pipeline.action import Action, Kind
from towers.pipeline.timeline import EQUAL_SECONDS, play
from towers.stages.pieces import Piece
from towers.stages.places import Place
from towers.stages.staged_passes import StagedPasses
from towers.stages.staged_trace import StagedTrace
from towers.task import Batch
from towers.timeline.activities import EXCHANGE_SCOPE, action_scope
from towers.tower import EvaluationResult, TowerResult


class PipelineTower:
    """The training pass of a tower. Called as a `TowerFunction` that gets several microbatches at once."""

    def __init__(self, passes: StagedPasses, devices: Sequence[str], *, inlined: bool = False):
        """Args:
        passes: the model's passes in pieces, the same for all towers.
        devices: the tower's devices; device i takes the actions of device i of the schedule.
        inlined: whether the pieces become operations of the graph instead of function calls.
        """
        self._passes, self._inlined = passes, inlined
        homes = passes.schedule.stage_devices
        self._devices = [devices[homes[stage]] for stage in range(passes.stages.num_stages)]
        played = play(passes.schedule, lambda stage: EQUAL_SECONDS)
        timed = [one for of_device in played.devices for one in of_device]
        # All that an action needs ends before it starts, so it comes earlier in this order.
        self._order = [one.action for one in sorted(timed, key=lambda one: one.start_seconds)]

    @property
    def decays(self) -> Sequence[float | None]:
        """The decay of each state variable, as for `towers.moving_averages.after_all`; known after a call."""
        return self._passes.decays

    def __call__(
        self,
        parameters: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        parts: Sequence[Batch],
        seeds: Sequence[tf.Tensor],
        gains: Sequence[tf.Tensor],
    ) -> TowerResult:
        """One pass of all microbatches; returns their sums.

        Args:
          parameters, state: one tensor for each variable.
          parts, seeds, gains: for each microbatch, as for `TowerFunction`. For an empty microbatch, an example of
            the batch with gain 0, which does not change the state.
        """
        found = self._passes.training(parts[0])
        shared = _Shared(found, self._passes, self._devices, parameters, self._inlined)
        run = _TrainingRun(found, self._passes, self._devices, shared, state, (parts, seeds, gains))
        for action in self._order:
            run.act(action)
        return run.result()


class PipelineEvaluation:
    """The evaluation pass of a tower. Called as an `EvaluationFunction`; the batch passes the stages undivided."""

    def __init__(self, passes: StagedPasses, devices: Sequence[str], *, inlined: bool = False):
        """As for `PipelineTower`."""
        self._passes, self._inlined = passes, inlined
        homes = passes.schedule.stage_devices
        self._devices = [devices[homes[stage]] for stage in range(passes.stages.num_stages)]

    def __call__(self, parameters, state, batch: Batch, gain) -> EvaluationResult:
        found = self._passes.evaluation(batch)
        shared = _Shared(found, self._passes, self._devices, parameters, self._inlined)
        values = dict(zip(found.state, state, strict=True))
        values |= _named(found, batch, [gain])
        for stage in range(len(self._devices)):
            shared.compute(Place(stage, Kind.FORWARD), values)
        return found.packed([values[name] for name in found.results])


class _Shared:
    """What all microbatches of a call share: parameters, and what is computed only from them."""

    def __init__(
        self, found: StagedTrace, passes: StagedPasses, devices: Sequence[str], parameters, inlined: bool
    ):
        self.pieces, self._devices, self._inlined = found.pieces, devices, inlined
        # Inlined pieces can't take eager tensors.
        self.values = {name: tf.identity(value) for name, value in found.captured.items()}
        for name, reading in zip(found.readings, passes.readings, strict=True):
            with tf.device(devices[reading.stage]):
                self.values[name] = whole(parameters[reading.parameter])
        for stage in range(len(devices)):
            self.compute(Place(stage, None), self.values)

    def compute(self, place: Place, values: dict[str, tf.Tensor], after: Sequence[tf.Tensor] = ()) -> list[str]:
        """Adds the outputs of the piece at a place, if there is one, to `values`, and returns their names.

        Args:
          place: the place.
          values: tensors of a microbatch by name.
          after: tensors of the device that must be computed before the piece starts.
        """
        piece = self.pieces.get(place)
        if piece is None:
            return []
        waiting = self._waiting(piece, values) if after else ()
        with tf.device(self._devices[place.stage]):
            with tf.control_dependencies(after):
                given = {name: tf.identity(values[name]) for name in waiting}
            arguments = [given.get(name, values.get(name, self.values.get(name))) for name in piece.inputs]
            found = (piece.graph.imported if self._inlined else piece.function)(*arguments)
        values.update(zip(piece.outputs, found, strict=True))
        return list(piece.outputs)

    def _waiting(self, piece: Piece, values: Mapping[str, tf.Tensor]) -> list[str]:
        """The inputs that must wait for the device: from other pieces; the rest of the piece needs them."""
        # One operation for all results of an action, instead of an edge from each to each of these inputs, saves
        # nothing: a step takes 190.6 ms, with the edges 189.6 (Intel Xeon with AMX).
        own = {
            name
            for other in self.pieces.values()
            if other.place.stage == piece.place.stage
            for name in other.outputs
        }
        varying = [name for name in piece.inputs if name in values]
        return [name for name in varying if name not in own] or varying


class _TrainingRun:
    """The graph of one call, built action by action."""

    def __init__(
        self,
        found: StagedTrace,
        passes: StagedPasses,
        devices: Sequence[str],
        shared: _Shared,
        state,
        microbatches,
    ):
        parts, seeds, self._gains = microbatches
        self._passes, self._devices, self._trace, self._shared = passes, devices, found, shared
        self._values = [
            _named(self._trace, *of_one)
            for of_one in zip(parts, zip(seeds, self._gains, strict=True), strict=True)
        ]
        self._state = list(state)
        # By index of a moving statistic and by microbatch: its values before and after.
        self._moving = {index: {} for index, decay in enumerate(passes.decays) if decay is not None}
        self._new_state = self._trace.new_state_names()
        self._state_homes = [passes.stages.stages_of(variable)[0] for variable in passes.variables.state]
        self._gradients = self._trace.gradient_names()
        # For each reading the sum of its dense gradients so far.
        self._sums: dict[int, tf.Tensor] = {}
        # By device: the last tensors of its latest action.
        self._ends: dict[str, list[tf.Tensor]] = {}
        self._sent = {
            name
            for piece in self._trace.pieces.values()
            for name in piece.inputs
            if any(
                name in other.outputs and other.place.stage != piece.place.stage
                for other in self._trace.pieces.values()
            )
        }

    def act(self, action: Action) -> None:
        """Adds an action of the schedule to the graph."""
        device, values = self._devices[action.stage], self._values[action.microbatch]
        if action.kind is Kind.FORWARD:
            for index, home in enumerate(self._state_homes):
                if home == action.stage:
                    values[self._trace.state[index]] = self._state[index]
        with tf.name_scope(action_scope(action)):
            outputs = self._shared.compute(Place(action.stage, action.kind), values, self._ends.get(device, ()))
        if not outputs:
            return
        ends = [values[name] for name in outputs if name in self._sent or name in self._trace.results]
        with tf.device(device):
            self._ends[device] = [tf.identity(value) for value in ends or [values[name] for name in outputs]]
        with tf.name_scope(EXCHANGE_SCOPE):
            self._add_gradients(outputs, values)
        if action.kind is Kind.FORWARD:
            self._pass_state_on(outputs, action.microbatch)

    def _add_gradients(self, outputs: Sequence[str], values: Mapping[str, tf.Tensor]) -> None:
        for index, names in self._gradients.items():
            if len(names) > 1 or names[0] not in outputs:
                continue
            with tf.device(self._devices[self._passes.readings[index].stage]):
                before = [self._sums[index]] if index in self._sums else []
                self._sums[index] = gradients.add([*before, values[names[0]]])

    def _pass_state_on(self, outputs: Sequence[str], microbatch: int) -> None:
        values, is_active = self._values[microbatch], self._gains[microbatch] > 0
        for index, name in self._new_state.items():
            if name in outputs:
                with tf.device(self._devices[self._state_homes[index]]):
                    before, after = self._state[index], tf.where(is_active, values[name], self._state[index])
                self._state[index] = after
                if index in self._moving:
                    self._moving[index][microbatch] = before, after

    def result(self) -> TowerResult:
        """The sums over all microbatches. Call it after all actions."""
        of_parameters: dict[int, list] = {}
        homes: dict[int, str] = {}
        for index in self._gradients:
            reading = self._passes.readings[index]
            homes.setdefault(reading.parameter, self._devices[reading.stage])
            of_parameters.setdefault(reading.parameter, []).append(index)
        found = []
        for parameter, indices in sorted(of_parameters.items()):
            with tf.device(homes[parameter]), tf.name_scope(EXCHANGE_SCOPE):
                summed = gradients.add([self._gradient(index) for index in indices])
            if not isinstance(summed, tf.IndexedSlices):
                summed.set_shape(self._passes.variables.parameters[parameter].shape)
            found.append(summed)
        with tf.device(self._devices[-1]), tf.name_scope(EXCHANGE_SCOPE):
            scalars = [self._trace.scalars_of(values) for values in self._values]
            return TowerResult(
                tf.add_n([of_one.loss_sum for of_one in scalars]),
                tf.add_n([of_one.weight for of_one in scalars]),
                found,
                {index: self._state[index] for index in self._new_state},
                sums.add_metrics([of_one.metric_sums for of_one in scalars]),
                Microbatches(tf.stack([of_one.weight for of_one in scalars]), self._added()),
            )

    def _added(self) -> list[tf.Tensor]:
        """`added` for `Microbatches`. A schedule may take the microbatches in any order."""
        found = []
        for index, by_microbatch in self._moving.items():
            with tf.device(self._devices[self._state_homes[index]]):
                pairs = [pair for _, pair in sorted(by_microbatch.items())]
                before, after = (tf.stack(values) for values in zip(*pairs, strict=True))
                found.append(after - self._passes.decays[index] * before)
        return found

    def _gradient(self, index: int) -> gradients.Gradient:
        """The sum of a reading's gradients over the microbatches."""
        if index in self._sums:
            return self._sums[index]
        return gradients.add([self._trace.gradient(index, values) for values in self._values])


def _named(found: StagedTrace, batch: Batch, scalars: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    """The tensors of a batch and the scalars, by their names in the trace."""
    flat = tf.nest.flatten(batch, expand_composites=True)
    return dict(zip([*found.batch, *found.scalars], [*flat, *scalars], strict=True))
