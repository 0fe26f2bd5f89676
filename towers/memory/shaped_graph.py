"""A traced function as one graph: its calls are inlined, and all shapes are known for a batch of a given length.

`towers.engine.Engine` traces a step for batches of any length. Here the batch gets a length, and TensorFlow infers
all shapes that follow from it.
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.framework import meta_graph, op_def_registry
from tensorflow.python.grappler import tf_optimizer  # the only way to call the graph optimizer
from tensorflow.python.ops import handle_data_util  # the only way to give an argument the shape of a variable

from towers.tracing.flat_graph import FlatGraph

# Name prefix of the placeholders that replace arguments; the original placeholders stay, but nothing reads them.
ARGUMENT = "argument/"
# How TensorFlow says that a tensor, or one of its dimensions, would have too many elements.
_TOO_LARGE = ("is too large", "out of int32 range")


class BatchTooLarge(ValueError):
    """A tensor of a batch would have more elements than TensorFlow can count."""


def inlined(concrete) -> tf.compat.v1.GraphDef:
    """The graph of a concrete function with all called functions inlined, as TensorFlow runs it."""
    described, _ = meta_graph.export_scoped_meta_graph(
        graph=concrete.graph, graph_def=concrete.graph.as_graph_def(add_shapes=True)
    )
    kept = meta_graph_pb2.CollectionDef()
    kept.node_list.value.extend(tensor.name for tensor in (*concrete.inputs, *concrete.outputs))
    kept.node_list.value.extend(operation.name for operation in concrete.graph.control_outputs)
    described.collection_def["train_op"].CopyFrom(kept)
    in_functions = [node for function in described.graph_def.library.function for node in function.node_def]
    for node in (*described.graph_def.node, *in_functions):
        # Each loop or branch stays one operation with a body.
        _drop(node, "_lower_using_switch_merge")
        # The attribute may name a node that the optimizer replaces; the devices suffice.
        _drop(node, "_class")
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    config.graph_options.rewrite_options.optimizers.append("function")
    found = tf_optimizer.OptimizeGraph(config, described)
    for node in found.node:
        _drop(node, "_output_shapes")
    return _without_unused(found, kept.node_list.value)


def _without_unused(graph_def: tf.compat.v1.GraphDef, results: Sequence[str]) -> tf.compat.v1.GraphDef:
    """The graph without nodes that have neither effect nor result, mostly unused arguments: as it runs."""
    has_effect = [node.name for node in graph_def.node if op_def_registry.get(node.op).is_stateful]
    found = FlatGraph(graph_def, (), results, has_effect).without_dead_nodes().graph_def
    for node in found.node:
        # The attribute may name an unused node; all nodes have a device by now.
        _drop(node, "_class")
    return found


def _drop(node, attribute: str) -> None:
    if attribute in node.attr:
        del node.attr[attribute]


def shaped(graph_def, arguments: Mapping[str, tuple[tf.Tensor, int | None]]) -> tf.Graph:
    """The graph with all shapes that follow from its arguments.

    Args:
      graph_def: GraphDef from `inlined`, or of another function.
      arguments: by the name of an argument, a tensor like it, and the batch's length if its dimension 0 is open.

    Raises:
      BatchTooLarge: TensorFlow can't compute a batch of this length.
    """
    with tf.Graph().as_default() as graph:
        try:
            given = {f"{name}:0": _argument(name, *like) for name, like in arguments.items()}
            tf.graph_util.import_graph_def(graph_def, input_map=given, name="")
        except ValueError as error:
            if any(words in str(error) for words in _TOO_LARGE):
                raise BatchTooLarge(str(error)) from None
            raise
    return graph


def is_open(tensor: tf.Tensor) -> bool:
    """Whether a tensor has the length of the batch: its dimension 0 is open."""
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _argument(name: str, like: tf.Tensor, length: int | None) -> tf.Tensor:
    """A placeholder that stands for an argument: with the batch's length, or a variable of known shape."""
    shape = [length, *like.shape[1:]] if is_open(like) else like.shape
    found = tf.compat.v1.placeholder(like.dtype, shape, name=f"{ARGUMENT}{name}")
    handle_data_util.copy_handle_data(like, found)
    return found
