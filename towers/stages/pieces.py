"""Cuts a traced function into pieces, each a function of its own: what one stage computes in one pass.

x, kernel -> [forward 0] -> y, kept -> ...        inputs and outputs are the tensors that cross a piece's edge
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import tensorflow as tf

from towers.stages.places import Place
from towers.tracing.flat_graph import FlatGraph, flat_graph
from towers.tracing.traced_once import optimized_if_needed

_GIVEN = "given_to_the_piece_"


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """The part of a traced function at one place (a stage and a pass).

    Attributes:
      place: the place.
      inputs, outputs: names of the tensors that it reads from other pieces, and of those that others read.
      function: a function from the list of inputs to the list of outputs.
      graph: the same as a `FlatGraph`, whose `imported` computes it without a function call.
    """

    place: Place
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    function: Callable[..., list[tf.Tensor]]
    graph: FlatGraph


def pieces_of(
    graph: tf.Graph, places: Mapping[str, Place], sources: Collection[str], results: Collection[str]
) -> dict[Place, Piece]:
    """The pieces of a graph by place.

    Args:
      graph: the graph of a traced function.
      places: the place of each operation, by name; an operation without a place is copied to each piece that reads
        it.
      sources: names of the operations that are the function's arguments.
      results: names of tensors that are outputs even if no other piece reads them.
    """
    graph_def = graph.as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    members: dict[Place, list[tf.Operation]] = {}
    for operation in graph.get_operations():
        if operation.name in places:
            members.setdefault(places[operation.name], []).append(operation)
    found = {}
    for place, own in members.items():
        operations = _with_copies(own, places, sources)
        here = {operation.name for operation in operations}
        inputs = {t.name: t for operation in operations for t in operation.inputs if t.op.name not in here}
        outputs = [
            tensor
            for operation in own
            for tensor in operation.outputs
            if tensor.name in results or any(places.get(r.name, place) != place for r in tensor.consumers())
        ]
        part = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
        numbers = {name: index for index, name in enumerate(inputs)}
        part.node.extend(_placeholder(index, tensor) for index, tensor in enumerate(inputs.values()))
        part.node.extend(_rewritten(operation, nodes[operation.name], numbers, here) for operation in operations)
        concrete = _traced(part, list(inputs.values()), [tensor.name for tensor in outputs])
        flat = flat_graph(concrete)
        found[place] = Piece(
            place,
            tuple(inputs),
            tuple(tensor.name for tensor in outputs),
            optimized_if_needed(concrete, flat),
            flat,
        )
    return found


def _with_copies(own: Sequence[tf.Operation], places, sources) -> list[tf.Operation]:
    """The operations of a piece, and those without a place that they depend on."""
    found = {operation.name: operation for operation in own}
    waiting = list(own)
    while waiting:
        for tensor in waiting.pop().inputs:
            name = tensor.op.name
            if name not in found and name not in places and name not in sources:
                found[name] = tensor.op
                waiting.append(tensor.op)
    return list(found.values())


def _placeholder(index: int, tensor: tf.Tensor):
    node = tf.compat.v1.NodeDef(name=f"{_GIVEN}{index}", op="Placeholder")
    node.attr["dtype"].type = tensor.dtype.as_datatype_enum
    return node


def _rewritten(operation: tf.Operation, node, numbers: Mapping[str, int], here: Collection[str]):
    """The node, with placeholders for its inputs from other pieces."""
    copy = tf.compat.v1.NodeDef()
    copy.CopyFrom(node)
    data = [f"{_GIVEN}{numbers[t.name]}" if t.name in numbers else t.name for t in operation.inputs]
    controls = [f"^{before.name}" for before in operation.control_inputs if before.name in here]
    del copy.input[:]
    copy.input.extend([*data, *controls])
    # The attribute names operations to be colocated with, which may be in another piece.
    copy.attr.pop("_class", None)
    return copy


def _traced(part, inputs: Sequence[tf.Tensor], outputs: Sequence[str]):
    """A part of a graph as a concrete function."""

    def imported(*given):
        named = {f"{_GIVEN}{index}:0": value for index, value in enumerate(given)}
        return tf.graph_util.import_graph_def(part, input_map=named, return_elements=list(outputs), name="")

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    return tf.function(imported, autograph=False).get_concrete_function(*specs)
