"""Runs a functional model stage by stage while it is traced, and notes which stage each operation belongs to.

    stage 0            stage 1
    x -> leaving ----> arriving -> ...          forward
    g <- leaving <---- g                        backward

Between two stages a tensor passes two identities, one in each stage. So what a stage keeps for its backward pass
is its own, and the gradient that it gets is an operation of the stage too.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf
from keras import tree

from towers.recompute.recomputation import TracedPass
from towers.stages.model_stages import ModelStages


class Marks:
    """Which stage the operations of a graph belong to, noted while they are made.

    Attributes:
      first, last: number of operations before the first stage, and after the last one.
      backward: number of operations before the backward pass; None if there is none.
      end: number of operations that the function made; what follows passes results on.
      recomputed: what the backward pass computes again; None if there is none.
    """

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._stage: int | None = None
        # (number of operations, the stage of those that follow)
        self._changes: list[tuple[int, int | None]] = [(0, None)]
        self.first = self.last = self.end = 0
        self.backward: int | None = None
        self.recomputed: TracedPass | None = None

    @property
    def count(self) -> int:
        """Number of operations so far."""
        return len(self._graph.get_operations())

    @contextlib.contextmanager
    def at(self, stage: int):
        """Context manager: the operations made inside it belong to the stage."""
        before = self._stage
        self._set(stage)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, stage: int | None) -> None:
        self._stage = stage
        self._changes.append((self.count, stage))

    def stages(self) -> list[int | None]:
        """[operations] the stage of each operation; None for those outside all stages."""
        found: list[int | None] = []
        ends = [*(count for count, _ in self._changes[1:]), self.count]
        for (begin, stage), end in zip(self._changes, ends, strict=True):
            found += [stage] * (end - begin)
        return found


class StagedRun:
    """Takes the place of a functional model's `_run_through_graph`."""

    def __init__(
        self,
        stages: ModelStages,
        marks: Marks,
        readings: Sequence[Mapping[keras.Variable, tf.Tensor]] | Sequence[list],
    ):
        """Args:
        stages: the model's stages.
        marks: gets a note for each stage.
        readings: [stages] pairs (variable, value) of the parameters that each stage reads. Another stage that
          reads a parameter too has a value of its own, so that each has its own gradient.
        """
        self._stages, self._marks, self._readings = stages, marks, readings
        self._left: dict[int, tf.Tensor] = {}
        self._arrived: dict[tuple[int, int], tf.Tensor] = {}

    def __call__(self, inputs, operation_fn: Callable = lambda operation: operation, call_fn=None):
        functional = self._stages.functional
        # By id of Keras's symbolic tensor: the stage that computed it (None for an input), and its value.
        values = {id(x): (None, y) for x, y in zip(functional.inputs, tree.flatten(inputs), strict=True)}
        self._marks.first = self._marks.count
        for stage, nodes in enumerate(self._stages.nodes):
            with self._marks.at(stage):
                for variable, value in self._readings[stage]:
                    variable.assign(value)
                for node in nodes:
                    read = {id(x): self._at(stage, *values[id(x)]) for x in node.input_tensors}
                    args, kwargs = node.arguments.fill_in(read)
                    found = tree.flatten(operation_fn(node.operation)(*args, **kwargs))
                    values.update({id(x): (stage, y) for x, y in zip(node.outputs, found, strict=True)})
        last = self._stages.num_stages - 1
        with self._marks.at(last):
            outputs = [self._at(last, *values[id(x)]) for x in functional.outputs]
        self._marks.last = self._marks.count
        return tree.pack_sequence_as(functional._outputs_struct, outputs)

    def _at(self, stage: int, source: int | None, value):
        """A value in a stage, which may not be the one that computed it."""
        if source == stage or value is None:
            return value
        key = (id(value), stage)
        if key not in self._arrived:
            self._arrived[key] = _with_mask_of(value, tf.identity, self._leaving(source, value))
        return self._arrived[key]

    def _leaving(self, source: int | None, value):
        is_differentiable = tf.is_tensor(value) and value.dtype.is_floating
        if source is None or not is_differentiable:
            return value
        if id(value) not in self._left:
            with self._marks.at(source):
                self._left[id(value)] = self._identity_of(source)(value)
        return self._left[id(value)]

    def _identity_of(self, stage: int) -> Callable:
        """An identity whose gradient is an operation of the stage."""

        @tf.custom_gradient
        def identity(value):
            def gradient(upstream):
                with self._marks.at(stage):
                    return tf.identity(upstream)

            return tf.identity(value), gradient

        return identity


def _with_mask_of(value, function, leaving):
    """`function(leaving)`, with Keras's mask of `value`."""
    found = function(leaving)
    mask = keras.src.backend.get_keras_mask(value)
    if mask is not None:
        keras.src.backend.set_keras_mask(found, function(mask))
    return found
