"""A function as a flat graph: its GraphDef, and the names of its input and output tensors."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context  # the only way to read a function that TensorFlow knows

from towers.tracing import graph_optimizer

# Changes the GraphDef of a graph in place.
Change = Callable[[tf.Graph, tf.compat.v1.GraphDef], None]


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
        """A function from inputs of these specs to the list of outputs."""
        return tf.function(self.imported, autograph=False).get_concrete_function(*specs)

    def imported(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        """The outputs for these inputs, as operations of the current graph."""
        waited_for = {name for node in self.graph_def.node for name in node.input if name.startswith("^")}
        given = dict(zip(self.inputs, flat, strict=True))
        # The optimizer may turn a control input on an operation into one on an argument.
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
        """The graph without operations that neither an output nor an effect needs."""
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
    """The graph of a concrete function, optimized here if TensorFlow does not do it.

    Args:
      concrete: the function.
      change: as for `TracedOnce`.
      is_optimized: whether it consists of parts that are already optimized.
    """
    graph_def = concrete.graph.as_graph_def(add_shapes=True)
    if change is not None:
        change(concrete.graph, graph_def)
    inputs, outputs = ([tensor.name for tensor in tensors] for tensors in (concrete.inputs, concrete.outputs))
    effects = [operation.name for operation in concrete.graph.control_outputs]
    if not is_optimized and graph_optimizer.must_optimize(concrete):
        graph_def = graph_optimizer.optimized_graph(concrete, graph_def)
    _restore_known_functions(graph_def)
    return FlatGraph(graph_def, inputs, _bypass_identities(graph_def, outputs, kept=effects), effects)


def _restore_known_functions(graph_def: tf.compat.v1.GraphDef) -> None:
    """Restores the definitions that TensorFlow has of the graph's functions, such as bodies of loops.

    TensorFlow runs its own definitions anyway. A step that is a `wrap_function`, as with ParameterServerStrategy,
    registers all functions of its graph, and TensorFlow refuses a second definition of a name: the optimizer's, or
    one with shapes.
    """
    known = context.context()
    for function in graph_def.library.function:
        if known.has_function(function.signature.name):
            function.CopyFrom(known.get_function_def(function.signature.name))


def _bypass_identities(
    graph_def: tf.compat.v1.GraphDef, names: Sequence[str], *, kept: Sequence[str]
) -> list[str]:
    """Removes Identity nodes that are not needed: each tower would get a copy of them.

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
