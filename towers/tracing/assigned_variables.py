"""Finds a `tf.Variable` that a traced tower assigns.

Keras's variables are tensors while a tower is traced (`towers.tower_scope`). A `tf.Variable` that a layer keeps as
an attribute is not among them: its assignment is an operation of the graph, which runs once in each tower and
microbatch.
"""

import keras
import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs
from tensorflow.python.framework.func_graph import FuncGraph

from towers.errors import UserError

# How operations that assign begin. Others that change a resource draw random numbers or search tables.
_ASSIGNMENTS = ("Assign", "ResourceScatter")
# They assign what an operation in one of their functions does.
_CALLS = ("If", "While", "Case", "StatefulPartitionedCall")


def check_assigns_no_variable(graph: FuncGraph, model: keras.Model) -> None:
    """Raises UserError if the graph of a tower, whose model this is, assigns a `tf.Variable`."""
    for handle, inner in graph.captures:
        if inner.dtype == tf.resource and any(_assigns(operation, inner) for operation in inner.consumers()):
            raise UserError(
                f"{_name(handle, model)} is assigned while the model trains, but it is no weight of the model, so "
                "each tower would assign it, and no checkpoint would have it: make it with add_weight(..., "
                "trainable=False)"
            )


def _assigns(operation: tf.Operation, handle: tf.Tensor) -> bool:
    """Whether the operation changes the variable that one of its inputs refers to."""
    if operation.type in _CALLS:
        return handle in get_read_write_resource_inputs(operation)[1]
    return operation.type.startswith(_ASSIGNMENTS)


def _name(handle: tf.Tensor, model: keras.Model) -> str:
    """What a user calls the variable: its layer and attribute, if it is one of a layer's."""
    for layer in model._flatten_layers():
        for attribute, value in vars(layer).items():
            if isinstance(value, tf.Variable) and value.handle is handle:
                return f"the tf.Variable {attribute!r} of layer {layer.name!r}"
    return "a tf.Variable"
