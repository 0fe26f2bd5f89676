"""Recomputation of a tower: what to compute again, and the tower's graph with it."""

import contextlib
from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.recompute.ranges import RangeRecorder
from towers.recompute.second_computation import RecomputedRange, compute_again
from towers.recompute.segments import segments_of, shown

Gradient = tf.Tensor | tf.IndexedSlices | None


class Recomputation:
    """The parts of a model whose activations the backward pass of a tower computes again.

    Attributes:
      segments: the parts; none if nothing is computed again.
    """

    def __init__(self, model: keras.Model, recompute: str):
        """Args:
        model: a built template.
        recompute: one of `towers.recompute.segments.POLICIES`.

        Raises:
          UserError: the model has no such parts.
        """
        self.segments = segments_of(model, recompute)
        self._model = model
        # Passes whose graphs are not yet changed, by graph.
        self._passes: dict[tf.Graph, TracedPass] = {}

    def traced_pass(self) -> "TracedPass":
        """A `TracedPass` for the graph that is being traced."""
        traced = TracedPass(RangeRecorder(self.segments, self._model))
        if self.segments:
            self._passes[tf.compat.v1.get_default_graph()] = traced
        return traced

    def change(self, graph: tf.Graph, graph_def: tf.compat.v1.GraphDef) -> None:
        """Changes the GraphDef of a graph in which a pass was traced: adds the second computations."""
        traced = self._passes.pop(graph)
        traced.compute_again(graph, graph_def, traced.ranges)


class TracedPass:
    """A training pass while it is traced.

    Attributes:
      ranges: the operations to compute again, once the gradients are known.
      backward_begin: index of the first operation of the backward pass.
      results: the gradients of the sources.
    """

    def __init__(self, recorder: RangeRecorder):
        self.ranges: list[RecomputedRange] = []
        self.backward_begin = 0
        self.results: list[tf.Tensor] = []
        self._recorder = recorder

    def forward(self) -> contextlib.AbstractContextManager:
        """Context manager around the call of the model."""
        return self._recorder.recording()

    def gradients(self, tape: tf.GradientTape, objective: tf.Tensor, sources: Sequence) -> list[Gradient]:
        """`tape.gradient(objective, sources)`."""
        ranges = self._recorder.ranges
        self.backward_begin = len(tf.compat.v1.get_default_graph().get_operations())
        outputs = [one.outputs for one in ranges]
        found, of_outputs = tape.gradient(objective, [list(sources), outputs])
        self.ranges = [
            RecomputedRange(one, tuple(_tensors(gradients)))
            for one, gradients in zip(ranges, of_outputs, strict=True)
        ]
        self.results = _tensors(found)
        return found

    def compute_again(
        self, graph: tf.Graph, graph_def: tf.compat.v1.GraphDef, ranges: Sequence[RecomputedRange]
    ) -> dict[str, str]:
        """`second_computation.compute_again` of some of the ranges."""
        return compute_again(graph, graph_def, ranges, backward_begin=self.backward_begin, results=self.results)


def notices(model: keras.Model, recompute: str) -> list[str]:
    """A line for the user that names the parts; none for 'none'."""
    names = [segment.name for segment in segments_of(model, recompute)]
    if not names:
        return []
    count = f"{len(names)} part{'s' if len(names) > 1 else ''} of the model"
    return [
        f"the backward pass computes the activations of {count} again: {shown(names)} (recompute={recompute!r})"
    ]


def _tensors(gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    found = [one for one in gradients if one is not None]
    return [one.values if isinstance(one, tf.IndexedSlices) else one for one in found]
