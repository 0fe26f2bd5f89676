"""Runs a functional model while it is traced, and notes which device of the tower each operation belongs to."""

from collections.abc import Callable, Mapping

import keras
from keras import tree

from towers.stages.crossings import Crossings
from towers.stages.marks import Marks
from towers.stages.model_stages import nodes_of

FIRST = 0


class PlacedRun:
    """Replaces a functional model's `_run_through_graph`."""

    def __init__(self, functional: keras.Model, homes: Mapping[int, int], marks: Marks):
        """Args:
        functional: the model.
        homes: by id of a node the index of its device; other nodes are on the first device.
        marks: records each change of the device.
        """
        self._functional, self._homes, self._marks = functional, homes, marks

    def __call__(self, inputs, operation_fn: Callable = lambda operation: operation, call_fn=None):
        functional, crossings = self._functional, Crossings(self._marks)
        # By id of Keras's symbolic tensor: the device that computed it, and its value.
        values = {id(x): (FIRST, y) for x, y in zip(functional.inputs, tree.flatten(inputs), strict=True)}
        for node in nodes_of(functional):
            device = self._homes.get(id(node), FIRST)
            with self._marks.at(device):
                read = {id(x): crossings.at(device, *values[id(x)]) for x in node.input_tensors}
                args, kwargs = node.arguments.fill_in(read)
                found = tree.flatten(operation_fn(node.operation)(*args, **kwargs))
            values.update({id(x): (device, y) for x, y in zip(node.outputs, found, strict=True)})
        with self._marks.at(FIRST):
            outputs = [crossings.at(FIRST, *values[id(x)]) for x in functional.outputs]
        return tree.pack_sequence_as(functional._outputs_struct, outputs)
