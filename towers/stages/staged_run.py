"""Runs a functional model stage by stage while it is traced, and records the stage of each operation."""

from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf
from keras import tree

from towers.stages.crossings import Crossings
from towers.stages.marks import Marks
from towers.stages.model_stages import ModelStages
from towers.tower_scope import read_as


class StagedRun:
    """Replaces a functional model's `_run_through_graph`."""

    def __init__(
        self,
        stages: ModelStages,
        marks: Marks,
        readings: Sequence[Mapping[keras.Variable, tf.Tensor]] | Sequence[list],
    ):
        """Args:
        stages: the model's stages.
        marks: records the stages.
        readings: [stages] pairs (variable, value) of the parameters that each stage reads. Another stage that
          reads a parameter too has a value of its own, so that each has its own gradient.
        """
        self._stages, self._marks, self._readings = stages, marks, readings
        self._crossings = Crossings(marks)

    def __call__(self, inputs, operation_fn: Callable = lambda operation: operation, call_fn=None):
        functional = self._stages.functional
        # By id of Keras's symbolic tensor: the stage that computed it (None for an input), and its value.
        values = {id(x): (None, y) for x, y in zip(functional.inputs, tree.flatten(inputs), strict=True)}
        self._marks.first = self._marks.count
        for stage, nodes in enumerate(self._stages.nodes):
            with self._marks.at(stage):
                for variable, value in self._readings[stage]:
                    read_as(variable, value)
                for node in nodes:
                    read = {id(x): self._crossings.at(stage, *values[id(x)]) for x in node.input_tensors}
                    args, kwargs = node.arguments.fill_in(read)
                    found = tree.flatten(operation_fn(node.operation)(*args, **kwargs))
                    values.update({id(x): (stage, y) for x, y in zip(node.outputs, found, strict=True)})
        last = self._stages.num_stages - 1
        with self._marks.at(last):
            outputs = [self._crossings.at(last, *values[id(x)]) for x in functional.outputs]
        self._marks.last = self._marks.count
        return tree.pack_sequence_as(functional._outputs_struct, outputs)
