"""A function of a model's variables and a batch, traced once and cut into the pieces of its stages."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import gradients
from towers.layers.shadowing import shadowed
from towers.pipeline.action import Kind
from towers.stages.marks import Marks
from towers.stages.model_stages import ModelStages
from towers.stages.pieces import Piece, pieces_of
from towers.stages.places import Place, Source, places_of, with_late_weights
from towers.stages.recomputed import recomputed_in_stages
from towers.stages.staged_run import StagedRun
from towers.tower import ModelVariables, TowerResult


@dataclasses.dataclass(frozen=True)
class Reading:
    """A parameter's value as one stage reads it. A parameter of several stages (tied weights) has several.

    Attributes:
      parameter: index of the parameter.
      stage: the stage.
    """

    parameter: int
    stage: int


def readings_of(stages: ModelStages, variables: ModelVariables) -> list[Reading]:
    """The readings of all parameters; the first reading of a parameter is in the stage where it lives."""
    return [
        Reading(index, stage)
        for index, variable in enumerate(variables.parameters)
        for stage in stages.stages_of(variable)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class StagedTrace:
    """A traced function in pieces.

    Attributes:
      pieces: the pieces by place.
      readings, state: names of the tensors that stand for parameters' readings and for the state.
      batch: names of the tensors of a batch, flat.
      scalars: names of the tensors of the last, scalar arguments.
      captured: values of the tensors that the function captured, by name.
      results: names of the function's results, flat.
      structure: the structure of the results, with specs of tensors.
    """

    pieces: Mapping[Place, Piece]
    readings: Sequence[str]
    state: Sequence[str]
    batch: Sequence[str]
    scalars: Sequence[str]
    captured: Mapping[str, tf.Tensor]
    results: Sequence[str]
    structure: Any

    def packed(self, values: Sequence) -> Any:
        """Flat results in their structure."""
        return tf.nest.pack_sequence_as(self.structure, list(values), expand_composites=True)

    def results_of(self, field: str) -> list[str]:
        """The names of the results in a field of the structure, which is a named tuple."""
        begin = 0
        for name, part in zip(self.structure._fields, self.structure, strict=True):
            count = len(tf.nest.flatten(part, expand_composites=True))
            if name == field:
                return list(self.results[begin : begin + count])
            begin += count
        raise AssertionError(f"no field {field}")

    def new_state_names(self) -> dict[int, str]:
        """The names of the new values of the state variables that change, by index."""
        return dict(zip(sorted(self.structure.new_state), self.results_of("new_state"), strict=True))

    def gradient_names(self) -> dict[int, list[str]]:
        """For each reading that has a gradient the names of its tensors: one, or those of IndexedSlices."""
        names, found = iter(self.results_of("gradients")), {}
        # Sorted, like the dict's values in `tf.nest`.
        for key, leaf in sorted(self.structure.gradients.items()):
            found[int(key)] = [next(names) for _ in tf.nest.flatten(leaf, expand_composites=True)]
        return found

    def gradient(self, index: int, values: Mapping[str, tf.Tensor]) -> gradients.Gradient:
        """The gradient of a reading, from values by name."""
        flat = [values[name] for name in self.gradient_names()[index]]
        (found,) = tf.nest.pack_sequence_as([self.structure.gradients[str(index)]], flat, expand_composites=True)
        return found

    def scalars_of(self, values: Mapping[str, tf.Tensor]) -> TowerResult:
        """The sums of a microbatch that are scalars, in their structure."""
        small = self.structure._replace(gradients=[], new_state=[])
        names = [name for field in ("loss_sum", "weight", "metric_sums") for name in self.results_of(field)]
        return tf.nest.pack_sequence_as(small, [values[name] for name in names])


def trace(
    function: Callable,
    stages: ModelStages,
    variables: ModelVariables,
    specs: Sequence,
    *,
    is_split: bool = False,
) -> StagedTrace:
    """Traces a function and cuts it into pieces.

    Args:
      function: takes readings, state, batch and scalars; calls its first argument, `Marks`, `begin_backward`. It
        runs the model once.
      stages: the model's stages.
      variables: the model's variables.
      specs: specs of readings (list), state (list), batch (structure) and each of the scalars.
      is_split: whether gradients that no other stage waits for become a separate piece.
    """
    readings = readings_of(stages, variables)
    found: list[Marks] = []

    def marked(values, *others):
        marks = Marks(tf.compat.v1.get_default_graph())
        found.append(marks)
        of_stages: list[list[tuple[keras.Variable, tf.Tensor]]] = [[] for _ in stages.nodes]
        for reading, value in zip(readings, values, strict=True):
            of_stages[reading.stage].append((variables.parameters[reading.parameter], value))
        run = StagedRun(stages, marks, of_stages)
        with shadowed([(stages.functional, "_run_through_graph", run)]):
            results = function(marks, values, *others)
        marks.end = marks.count
        return results

    concrete = tf.function(marked, autograph=False).get_concrete_function(*specs)
    return _in_pieces(concrete, found[-1], stages, readings, variables, specs, is_split)


def _in_pieces(concrete, marks, stages, readings, variables, specs, is_split) -> StagedTrace:
    graph, last = concrete.graph, stages.num_stages - 1
    names = [tensor.name for tensor in concrete.inputs]
    (of_readings, of_state, of_batch, *scalars), captured = _grouped(names, specs)
    sources = dict.fromkeys(of_batch, Source())
    for name, reading in zip(of_readings, readings, strict=True):
        sources[name] = Source(reading.stage, varies=False)
    for name, variable in zip(of_state, variables.state, strict=True):
        sources[name] = Source(stages.stages_of(variable)[0])
    sources |= {name: Source(is_small=True) for group in scalars for name in group}
    sources |= {name: Source(varies=False, is_small=True) for name in captured}
    sources = {name.split(":")[0]: source for name, source in sources.items()}
    places = places_of(graph, marks, sources, stages.num_stages)
    made = {operation.name for operation in graph.get_operations()[: marks.end]}
    results = [_returned(tensor, made) for tensor in concrete.outputs]
    for tensor in results:
        if tensor.op.name not in sources:
            places.setdefault(tensor.op.name, Place(last, Kind.FORWARD))
    if marks.recomputed:
        graph, places = recomputed_in_stages(graph, marks.recomputed, places)
    if is_split:
        places = with_late_weights(graph, places)
    result_names = [tensor.name for tensor in results]
    return StagedTrace(
        pieces=pieces_of(graph, places, sources, frozenset(result_names)),
        readings=of_readings,
        state=of_state,
        batch=of_batch,
        scalars=[name for group in scalars for name in group],
        captured=dict(zip(captured, concrete.captured_inputs, strict=True)),
        results=result_names,
        structure=concrete.structured_outputs,
    )


def _grouped(names: Sequence[str], specs: Sequence) -> tuple[list[Sequence[str]], Sequence[str]]:
    """The names of each argument's tensors, and of the tensors that the function captured."""
    groups, begin = [], 0
    for spec in specs:
        end = begin + len(tf.nest.flatten(spec, expand_composites=True))
        groups.append(names[begin:end])
        begin = end
    return groups, names[begin:]


def _returned(tensor: tf.Tensor, made: Collection[str]) -> tf.Tensor:
    """The tensor that the function itself returned, before the identity that TensorFlow adds to it."""
    while tensor.op.name not in made:
        tensor = tensor.op.inputs[0]
    return tensor
