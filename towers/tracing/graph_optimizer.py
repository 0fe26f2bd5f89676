"""Calls TensorFlow's graph optimizer on one graph, and says what it must not join or change."""

import itertools

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.grappler import cluster, tf_optimizer  # the only way to call the graph optimizer

from towers.tracing import compiled_functions


def must_optimize(concrete) -> bool:
    """Whether to optimize here: TensorFlow does not, and the function captures no resource (a lookup table)."""
    switched_off = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    return switched_off and all(value.dtype not in (tf.resource, tf.variant) for value in concrete.captured_inputs)


def optimized_graph(concrete, graph_def: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """The GraphDef of a concrete function, `graph_def`, after TensorFlow's graph optimizer."""
    # TensorFlow's export also tries to write the graph's collections, and warns of each lookup table in them.
    described = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    kept = meta_graph_pb2.CollectionDef()
    kept.node_list.value.extend(tensor.name for tensor in (*concrete.inputs, *concrete.outputs))
    kept.node_list.value.extend(operation.name for operation in concrete.graph.control_outputs)
    described.collection_def["train_op"].CopyFrom(kept)
    config = config_pb2.ConfigProto()
    # Optimize small graphs too, because each tower gets a copy.
    config.graph_options.rewrite_options.min_graph_nodes = -1
    if _has_control_flow(described.graph_def):
        # Function optimization would lower loops to nodes of one graph, which breaks a second import and the loops
        # of gradients.
        config.graph_options.rewrite_options.function_optimization = rewriter_config_pb2.RewriterConfig.OFF
        # This optimizer renames the branches of gradients, so that they are not found.
        config.graph_options.rewrite_options.disable_tfg_optimizer = True
    placed = {node.name for node in graph_def.node if node.device}
    # Operations that it joins for this CPU have no kernel on a worker's GPU.
    has_gpu = bool(tf.config.list_logical_devices("GPU"))
    if has_gpu or any(_must_not_be_joined(one, one.name in placed) for one in concrete.graph.get_operations()):
        config.graph_options.rewrite_options.remapping = rewriter_config_pb2.RewriterConfig.OFF
    cpu = device_properties_pb2.NamedDevice(name="/job:localhost/replica:0/task:0/device:CPU:0")
    cpu.properties.CopyFrom(device_properties_pb2.DeviceProperties(type="CPU", num_cores=1, frequency=1000))
    functions = compiled_functions.hide(described.graph_def.library)
    optimized = tf_optimizer.OptimizeGraph(config, described, cluster=cluster.Cluster(devices=[cpu]))
    compiled_functions.show(optimized.library, functions)
    return optimized


def _must_not_be_joined(operation: tf.Operation, is_placed: bool) -> bool:
    """Whether the optimizer must not join the operation with those that follow it (TensorFlow 2.21).

    Where TensorFlow uses oneDNN, the optimizer joins a batch norm and a ReLU to a _FusedBatchNormEx, which takes
    only multiples of four channels, and no float16 on CPUs; and a convolution on a named device and its bias to a
    _FusedConv2D, which can't be imported in bfloat16.
    """
    result = operation.outputs[0] if operation.outputs else None
    if operation.type == "FusedBatchNormV3":
        return (operation.outputs[1].shape[0] or 1) % 4 != 0 or result.dtype == tf.float16
    is_refused = is_placed and operation.type == "Conv2D" and result.dtype == tf.bfloat16
    return is_refused and any(one.type in ("BiasAdd", "AddV2") for one in result.consumers())


def _has_control_flow(graph_def) -> bool:
    """Whether TensorFlow runs loops or branches; those that XLA compiles are part of one operation."""
    ours = itertools.filterfalse(compiled_functions.is_compiled, graph_def.library.function)
    nodes = itertools.chain(graph_def.node, *(function.node_def for function in ours))
    return any(node.op.removeprefix("Stateless") in ("While", "If", "Case") for node in nodes)
