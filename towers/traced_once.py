"""A pure function of tensors as a graph that is traced once, optimized once and called on many devices.

TensorFlow's graph optimizer works on the graph that is called from Python: the whole step, which contains one copy
of the tower for each device. It optimizes each copy separately. If `towers.devices` has disabled it, the tower's
graph is optimized here instead, once, before it is copied: the first step of eight towers takes 1.15 times as long
as that of one, instead of 2 to 2.4 times. Without any optimizer all other steps would be 5 to 12% slower.
Towers that are not inlined into the step's graph (`_noinline`) make its first step longer: 6.4 s instead of 4.3.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.framework import meta_graph
from tensorflow.python.grappler import cluster, tf_optimizer  # the one way to call the graph optimizer

from towers import compiled_functions
from towers.layers.table_rows import TableRows
from towers.owners import Slices, whole
from towers.task import Batch

# Changes the description of a graph in place.
Change = Callable[[tf.Graph, tf.compat.v1.GraphDef], None]


class TracedOnce:
    """A function that is traced once for each spec of its batch, whose dimension 0 is open."""

    def __init__(
        self,
        function,
        *,
        xla: bool = False,
        change: Change | None = None,
    ):
        """Args:
        function: takes tensors, lists of them, `Batch` and `TableRows`; returns a structure of tensors. All
          arguments but these two have the same shapes in every call. Calls may give `Slices` in a list, which are
          joined on the current device.
        xla: compile it with XLA.
        change: changes the traced graph's description in place, before it is optimized; None for no change. Not
          with XLA.
        """
        self._function = tf.function(function, jit_compile=xla or None, autograph=False)
        self._xla, self._change = xla, change
        self._concrete = {}

    def __call__(self, *arguments):
        arguments = [_joined(argument) for argument in arguments]
        specs = specs_of(arguments)
        batch = batch_key(specs)
        if batch not in self._concrete:
            self._concrete[batch] = self._traced(specs)
        return self._concrete[batch](*arguments)

    def _traced(self, specs):
        concrete = self._function.get_concrete_function(*specs)
        if self._change is None and (self._xla or not _must_optimize(concrete)):
            return concrete
        return _with_graph(concrete, flat_graph(concrete, self._change))


def optimized_if_needed(concrete, flat: "FlatGraph | None" = None):
    """The concrete function, optimized here unless TensorFlow does it; `flat` is its `flat_graph`, if known."""
    return _with_graph(concrete, flat or flat_graph(concrete)) if _must_optimize(concrete) else concrete


def _joined(argument):
    return [whole(value) for value in argument] if isinstance(argument, list) else argument


def batch_key(specs: Sequence) -> str:
    """Tells batches of different specs apart, and structures too: weights that are () from weights in a tensor."""
    return repr([spec for spec in specs if isinstance(spec, Batch)])


def _must_optimize(concrete) -> bool:
    """Whether to optimize it here: TensorFlow does not, and no captured resource (a lookup table) prevents it."""
    switched_off = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    return switched_off and all(value.dtype not in (tf.resource, tf.variant) for value in concrete.captured_inputs)


class FlatGraph(NamedTuple):
    """A function of tensors as a graph, without the structure of its arguments and results.

    Attributes:
      graph_def: the graph.
      inputs, outputs: names of the tensors that are arguments and results.
      effects: names of operations that run even if no result needs them.
    """

    graph_def: tf.compat.v1.GraphDef
    inputs: Sequence[str]
    outputs: Sequence[str]
    effects: Sequence[str]

    def function(self, specs: Sequence[tf.TensorSpec]) -> Callable[..., list[tf.Tensor]]:
        """A function of the inputs, which have these specs, to the list of outputs."""
        return tf.function(self.imported, autograph=False).get_concrete_function(*specs)

    def imported(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        """The outputs for these inputs, as operations of the current graph."""
        waited_for = {name for node in self.graph_def.node for name in node.input if name.startswith("^")}
        given = dict(zip(self.inputs, flat, strict=True))
        # The optimizer may replace an operation that others wait for by an argument.
        controls = {f"^{node_of(name)}": value for name, value in given.items()}
        found = tf.graph_util.import_graph_def(
            self.graph_def,
            input_map={**given, **{name: value for name, value in controls.items() if name in waited_for}},
            return_elements=[*self.outputs, *self.effects],
            name="",
        )
        if not self.effects:
            return found
        with tf.control_dependencies(found[len(self.outputs) :]):
            return [tf.identity(tensor) for tensor in found[: len(self.outputs)]]

    def without_dead_nodes(self) -> "FlatGraph":
        """The graph without the operations that no output and no effect needs."""
        nodes = {node.name: node for node in self.graph_def.node}
        kept = {node_of(name) for name in self.inputs}
        waiting = [node_of(name) for name in (*self.outputs, *self.effects)]
        while waiting:
            name = waiting.pop()
            if name not in kept:
                kept.add(name)
                waiting += [node_of(source) for source in nodes[name].input]
        graph_def = tf.compat.v1.GraphDef(versions=self.graph_def.versions, library=self.graph_def.library)
        graph_def.node.extend(node for node in self.graph_def.node if node.name in kept)
        return self._replace(graph_def=graph_def)


def flat_graph(concrete, change: Change | None = None, *, is_optimized: bool = False) -> FlatGraph:
    """The graph of a concrete function, optimized if nothing else does that.

    Args:
      concrete: the function.
      change: as for `TracedOnce`.
      is_optimized: whether it consists of parts that are optimized.
    """
    graph_def = concrete.graph.as_graph_def(add_shapes=True)
    if change is not None:
        change(concrete.graph, graph_def)
    inputs, outputs = ([tensor.name for tensor in tensors] for tensors in (concrete.inputs, concrete.outputs))
    effects = [operation.name for operation in concrete.graph.control_outputs]
    if not is_optimized and _must_optimize(concrete):
        graph_def = _optimized_graph(concrete, graph_def)
    return FlatGraph(graph_def, inputs, _bypass_identities(graph_def, outputs, kept=effects), effects)


def _with_graph(concrete, flat: FlatGraph):
    """A function with the arguments and results of `concrete` that computes another graph."""
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in concrete.inputs]
    graph = flat.function(specs)

    def call(*arguments):
        found = graph(*tf.nest.flatten(arguments, expand_composites=True), *concrete.captured_inputs)
        return tf.nest.pack_sequence_as(concrete.structured_outputs, found, expand_composites=True)

    return call


def _optimized_graph(concrete, graph_def: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """The graph of a concrete function, described by `graph_def`, as TensorFlow's graph optimizer changes it."""
    described, _ = meta_graph.export_scoped_meta_graph(graph=concrete.graph, graph_def=graph_def)
    kept = meta_graph_pb2.CollectionDef()
    kept.node_list.value.extend(tensor.name for tensor in (*concrete.inputs, *concrete.outputs))
    kept.node_list.value.extend(operation.name for operation in concrete.graph.control_outputs)
    described.collection_def["train_op"].CopyFrom(kept)
    config = config_pb2.ConfigProto()
    # Optimizes small graphs too, because each tower gets a copy.
    config.graph_options.rewrite_options.min_graph_nodes = -1
    if _has_control_flow(described.graph_def):
        # Function optimization would lower loops to nodes of one graph, which breaks a second import and the loops
        # of gradients.
        config.graph_options.rewrite_options.function_optimization = rewriter_config_pb2.RewriterConfig.OFF
    placed = {node.name for node in graph_def.node if node.device}
    if any(_must_not_be_joined(one, one.name in placed) for one in concrete.graph.get_operations()):
        config.graph_options.rewrite_options.remapping = rewriter_config_pb2.RewriterConfig.OFF
    cpu = device_properties_pb2.NamedDevice(name="/job:localhost/replica:0/task:0/device:CPU:0")
    cpu.properties.CopyFrom(device_properties_pb2.DeviceProperties(type="CPU", num_cores=1, frequency=1000))
    functions = compiled_functions.hide(described.graph_def.library)
    optimized = tf_optimizer.OptimizeGraph(config, described, cluster=cluster.Cluster(devices=[cpu]))
    compiled_functions.show(optimized.library, functions)
    return optimized


def _must_not_be_joined(operation: tf.Operation, is_placed: bool) -> bool:
    """Whether the optimizer must not join it with the operations behind it (TensorFlow 2.21).

    Where TensorFlow uses oneDNN, the optimizer makes a _FusedBatchNormEx of a batch norm and a ReLU, which takes
    multiples of four channels only, and float16 only on GPUs; and a _FusedConv2D of a convolution on a named
    device and its bias, which in bfloat16 can't be imported.
    """
    result = operation.outputs[0] if operation.outputs else None
    if operation.type == "FusedBatchNormV3":
        in_float16 = result.dtype == tf.float16
        return (operation.outputs[1].shape[0] or 1) % 4 != 0 or (
            in_float16 and not tf.config.list_logical_devices("GPU")
        )
    is_refused = is_placed and operation.type == "Conv2D" and result.dtype == tf.bfloat16
    return is_refused and any(one.type in ("BiasAdd", "AddV2") for one in result.consumers())


def _bypass_identities(
    graph_def: tf.compat.v1.GraphDef, names: Sequence[str], *, kept: Sequence[str]
) -> list[str]:
    """Removes Identity nodes that are not needed, because each tower gets a copy of the graph.

    Args:
      graph_def: changed in place.
      names: the output tensors.
      kept: names of nodes that stay even if no output needs them.

    Returns:
      For each output, the tensor that its Identity nodes forwarded.
    """
    nodes = {node.name: node for node in graph_def.node}
    found = []
    for name in names:
        node = nodes[node_of(name)]
        # Arguments are not nodes of the imported graph, so the last Identity before one stays.
        while node.op == "Identity" and len(node.input) == 1 and nodes[node_of(node.input[0])].op != "Placeholder":
            name = node.input[0] if ":" in node.input[0] else f"{node.input[0]}:0"
            node = nodes[node_of(name)]
        found.append(name)
    waiting = [*found, *kept, *(name for node in nodes.values() if node.op != "Identity" for name in node.input)]
    used = set()
    while waiting:
        node = nodes[node_of(waiting.pop())]
        if node.op == "Identity" and node.name not in used:
            used.add(node.name)
            waiting.extend(node.input)
    left = [node for node in graph_def.node if node.op != "Identity" or node.name in used]
    del graph_def.node[:]
    graph_def.node.extend(left)
    return found


def node_of(name: str) -> str:
    """Name of the node of a tensor ('node:0') or of a control input ('^node')."""
    return name.split(":")[0].lstrip("^")


def _has_control_flow(graph_def) -> bool:
    """Whether TensorFlow runs loops or branches; those that XLA compiles are part of one operation."""
    ours = itertools.filterfalse(compiled_functions.is_compiled, graph_def.library.function)
    nodes = itertools.chain(graph_def.node, *(function.node_def for function in ours))
    return any(node.op.removeprefix("Stateless") in ("While", "If", "Case") for node in nodes)


def specs_of(argument):
    """The arguments' specs. Dimension 0 of a batch and of a table's rows is open: one trace serves all lengths."""
    if isinstance(argument, Batch | TableRows):
        return tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), argument)
    if isinstance(argument, Slices):
        shape = argument.parts[0].shape.as_list()
        shape[argument.dimension] = sum(part.shape[argument.dimension] for part in argument.parts)
        return tf.TensorSpec(shape, argument.parts[0].dtype)
    if isinstance(argument, list | tuple):
        return [specs_of(one) for one in argument]
    return tf.TensorSpec(argument.shape, argument.dtype)
