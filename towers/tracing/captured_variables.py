"""Finds variables that a traced tower uses directly, instead of the tensors in their place (`towers.tower_scope`).

A `tf.Variable` that a layer keeps as an attribute has no such tensor: its assignment is an operation of the graph,
which would run once in each tower and microbatch. A `tf.function` that was traced while the model was built reads
the model's own variables, which keep their initial values, and assigns nothing: Keras recorded that trace's
assignments elsewhere. This is right only for a frozen layer, such as a `TFSMLayer`, whose weights are a
SavedModel's.
"""

import keras
import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

from towers.errors import UserError

# Prefixes of operations that assign. Other operations that change a resource draw random numbers or search tables.
_ASSIGNMENTS = ("Assign", "ResourceScatter")
# These operations assign if an operation in one of their functions does.
_CALLS = ("If", "While", "Case", "StatefulPartitionedCall")


def check_captured_variables(model: keras.Model) -> None:
    """Raises UserError if the graph being traced uses the model's variables, or assigns others."""
    of_model = _handles(model)
    for handle, inner in tf.compat.v1.get_default_graph().captures:
        if inner.dtype != tf.resource:
            continue
        if id(handle) in of_model:
            raise UserError(
                f"{of_model[id(handle)]} is used in a tf.function, which was traced when the model was built and "
                "keeps the weight's first value: remove the tf.function from the call of its layer, or freeze the "
                "layer by trainable=False"
            )
        if any(_assigns(operation, inner) for operation in inner.consumers()):
            raise UserError(
                f"{_name(handle, model)} is assigned while the model trains, but it is no weight of the model, so "
                "each tower would assign it, and no checkpoint would have it: make it with add_weight(..., "
                "trainable=False)"
            )


def _handles(model: keras.Model) -> dict[int, str]:
    """The paths of the model's variables that may change, by the ids of their handles."""
    frozen = {id(one) for layer in model._flatten_layers() if not layer.trainable for one in layer.variables}
    # A table that is in another process has no value here.
    held = ((one.path, one._value) for one in model.variables if id(one) not in frozen)
    return {id(value.handle): path for path, value in held if isinstance(value, tf.Variable)}


def _assigns(operation: tf.Operation, handle: tf.Tensor) -> bool:
    """Whether the operation changes the variable that one of its inputs refers to."""
    if operation.type in _CALLS:
        return handle in get_read_write_resource_inputs(operation)[1]
    return operation.type.startswith(_ASSIGNMENTS)


def _name(handle: tf.Tensor, model: keras.Model) -> str:
    """The variable's name for the user: its layer and attribute, if a layer has it."""
    for layer in model._flatten_layers():
        for attribute, value in vars(layer).items():
            if isinstance(value, tf.Variable) and value.handle is handle:
                return f"the tf.Variable {attribute!r} of layer {layer.name!r}"
    return "a tf.Variable"
