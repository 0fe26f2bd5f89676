r"""Rewrites a tower's graph so that each unit's parameters are gathered for this unit alone.

    on the owners:   Identity(part 0)   Identity(part 1)   each waits for the unit before the last
                                 \       /
    on the tower:                 Concat  ->  operations of the unit

The sending side waits: TensorFlow sends a value as soon as it exists, so if the tower's side waited, the part
would already be there. In contrast to custom gradients around reads, nothing is computed twice, and uses outside
of layers are seen too (penalties, shared layers). In a tower of several devices each device has units of its own,
and joins their parts. Parts of other processes come by calls instead, which the towers of a process make together,
in one order (`towers.gathering.exchange`, `copied.py`):

    in a process:    gather 0 -> gather 1 -> gather 2 -> scatter a     (gather 2 waits for unit 0 of all towers)
                        |           |           |           |
                      unit 0      unit 1      unit 2      own part of the sums of the towers' gradients
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from towers.gathering.exchange import Call, OwnPart, UnitExchange
from towers.gathering.units import Use, waited_for
from towers.timeline.activities import EXCHANGE_SCOPE
from towers.tracing.flat_graph import FlatGraph, node_of

PREFIX = "gather_of_unit"
_CALL_OPS = ("StatefulPartitionedCall", "PartitionedCall")


class Parts(NamedTuple):
    """The parts of a parameter on the devices of this process.

    Attributes:
      devices: the owner of each part.
      shapes: shapes of the parts.
      dimension: dimension along which the parts are joined; any number for a single part.
    """

    devices: Sequence[str]
    shapes: Sequence[tf.TensorShape]
    dimension: int = 0


def with_gathers(flat: FlatGraph, parameters: Sequence[Parts], units: Sequence[Sequence[Use]]) -> FlatGraph:
    """The graph with a gather for each unit of uses; its first inputs are the parts of all parameters."""
    rewiring = _Rewiring(flat, [parts.shapes for parts in parameters])
    for index, (unit, before) in enumerate(zip(units, waited_for(units), strict=True)):
        waits, device = rewiring.waits(index, before), unit[0].device
        gathered = {
            parameter: _joined(
                rewiring, parameters[parameter], parameter, f"{PREFIX}_{index}/{parameter}", waits, device
            )
            for parameter in dict.fromkeys(use.parameter for use in unit)
        }
        rewiring.give(index, unit, gathered)
    return rewiring.finished(flat.outputs)


def _joined(
    rewiring: "_Rewiring", parts: Parts, parameter: int, name: str, waits: Sequence[str], home: str
) -> str:
    """Name of the node that has a parameter's value on the device that uses it, `home`."""
    dtype = rewiring.dtype_of(parameter)
    sent = []
    for index, (device, source) in enumerate(zip(parts.devices, rewiring.parts[parameter], strict=True)):
        node = rewiring.add("Identity", f"{name}/part_{index}", [source, *waits], device=device)
        node.attr["T"].type = dtype
        sent.append(node.name)
    if len(sent) == 1:
        return sent[0]
    axis = rewiring.add("Const", f"{name}/axis", [], device=home)
    axis.attr["dtype"].type = tf.int32.as_datatype_enum
    axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(parts.dimension, tf.int32))
    node = rewiring.add("ConcatV2", name, [*sent, axis.name], device=home)
    node.attr["N"].i = len(sent)
    node.attr["T"].type, node.attr["Tidx"].type = dtype, tf.int32.as_datatype_enum
    return name


class Exchanged(NamedTuple):
    """A graph that exchanges its parameters and gradients with other processes.

    Attributes:
      flat: the graph. Instead of a gradient its outputs have this process's part of the sum, or nothing.
      functions: the functions that it calls; they must live as long as the graph.
    """

    flat: FlatGraph
    functions: Sequence[object]


def with_exchange(
    flat: FlatGraph,
    parameters: Sequence[OwnPart],
    units: Sequence[Sequence[Use]],
    calls: Sequence[Call],
    exchange: UnitExchange,
    gradients: Sequence[Sequence[int]],
) -> Exchanged:
    """The graph with these calls; its first inputs are this process's parts of the parameters.

    Args:
      flat: the graph of this process's towers; gradients are dense.
      parameters: what this process has of each parameter.
      units: the uses that each gather serves.
      calls: calls from `towers.gathering.exchange.calls_of`.
      exchange: makes the functions that are called.
      gradients: for each parameter the positions of its gradients in the outputs, one for each tower; empty for a
        pass without gradients. The result of the exchange is at the first of these positions.
    """
    rewiring = _Rewiring(flat, [[part.shape for part in own.parts] for own in parameters])
    functions, last, sums, before = [], [], {}, waited_for(units)
    for number, (unit, used, device) in enumerate(calls):
        purpose = f"{'gradients' if unit is None else f'unit {unit}'}, call {number}"
        if unit is None:
            function = _traced(
                exchange.scatter(used, purpose), [parameters[index].whole for index in used], device
            )
            given = [
                rewiring.added_up(
                    f"{EXCHANGE_SCOPE}/sum_{number}/{index}",
                    [flat.outputs[position] for position in gradients[index]],
                    parameters[index].whole.dtype,
                    device,
                )
                for index in used
            ]
            waits = last
        else:
            own = [part for index in used for part in parameters[index].parts]
            function = _traced(
                exchange.gather(used, purpose), [tf.TensorSpec(each.shape, each.dtype) for each in own], device
            )
            given = [name for index in used for name in rewiring.parts[index]]
            waits = [*rewiring.waits(unit, before[unit]), *last]
        name = f"{EXCHANGE_SCOPE}/scatter_{number}" if unit is None else f"{PREFIX}_{unit}/call"
        found = rewiring.call(function, name, [*given, *waits], device)
        last = [f"^{name}"]
        functions.append(function)
        if unit is None:
            sums |= zip([index for index in used if parameters[index].parts], found, strict=True)
        else:
            rewiring.give(unit, units[unit], dict(zip(used, found, strict=True)))
    outputs: list[str | None] = list(flat.outputs)
    for index, positions in enumerate(gradients):
        for position in positions:
            outputs[position] = None
        outputs[positions[0]] = sums.get(index)
    return Exchanged(rewiring.finished([name for name in outputs if name is not None]), functions)


def _traced(function, specs: Sequence[tf.TensorSpec], device: str = ""):
    def placed(*given):
        with tf.device(device or None):
            return function(*given)

    return tf.function(placed, autograph=False).get_concrete_function(*specs)


class _Rewiring:
    """A graph in which parts and gathered values replace the parameters.

    Attributes:
      parts: for each parameter the names of the placeholders of its parts.
    """

    def __init__(self, flat: FlatGraph, shapes: Sequence[Sequence[tf.TensorShape]]):
        """Args:
        flat: the graph.
        shapes: for each parameter the shapes of its parts, which the new graph takes as inputs.
        """
        self._flat = flat
        self._graph_def = tf.compat.v1.GraphDef()
        self._graph_def.CopyFrom(flat.graph_def)
        self._nodes = {node.name: node for node in self._graph_def.node}
        self._whole = [node_of(name) for name in flat.inputs[: len(shapes)]]
        self.parts = [self._placeholders(*described) for described in zip(self._whole, shapes, strict=True)]
        self._unread = {name for name, parts in zip(self._whole, self.parts, strict=True) if parts != [name]}

    def dtype_of(self, parameter: int) -> int:
        """The dtype of a parameter as TensorFlow's enum number."""
        return self._nodes[self._whole[parameter]].attr["dtype"].type

    def _placeholders(self, name: str, shapes: Sequence[tf.TensorShape]) -> list[str]:
        """Names of the placeholders of a parameter's parts; the parameter's own if it has a single part."""
        whole = self._nodes[name]
        if [shape.as_proto() for shape in shapes] == [whole.attr["shape"].shape]:
            return [name]
        found = []
        for index, shape in enumerate(shapes):
            node = self._graph_def.node.add()
            node.CopyFrom(whole)
            node.name = f"{name}_part_{index}"
            node.attr["shape"].shape.CopyFrom(shape.as_proto())
            node.attr.pop("_output_shapes", None)
            found.append(node.name)
        return found

    def waits(self, index: int, before: Sequence[Use]) -> list[str]:
        """The control inputs of the gather of a unit: all operations of the unit that it waits for."""
        found = []
        for place, device in enumerate(dict.fromkeys(use.device for use in before)):
            controls = sorted({f"^{use.node}" for use in before if use.device == device})
            found.append(self.add("NoOp", f"{PREFIX}_{index}/{place}/wait", controls, device=device).name)
        return [f"^{name}" for name in found]

    def added_up(self, name: str, terms: Sequence[str], dtype: tf.DType, device: str) -> str:
        """The name of a tensor on a device: the sum of `terms`, or the only term itself."""
        if len(terms) == 1:
            return terms[0]
        node = self.add("AddN", name, terms, device=device)
        node.attr["N"].i, node.attr["T"].type = len(terms), dtype.as_datatype_enum
        return name

    def give(self, index: int, unit: Sequence[Use], gathered: Mapping[int, str]) -> None:
        """Makes a unit read gathered parameters: `gathered` has tensor names by the parameter's index."""
        found: dict[tuple, str] = {(parameter,): name for parameter, name in gathered.items()}
        for use in unit:
            source = found[use.parameter,]
            for position, conversion in enumerate(use.through):
                key = (use.parameter, *use.through[: position + 1])
                if key not in found:
                    found[key] = self._converted(index, conversion, source, use.device)
                    self._unread.add(conversion)
                source = found[key]
            self._nodes[use.node].input[use.position] = source

    def call(self, function, name: str, inputs: Sequence[str], device: str) -> list[str]:
        """Adds a call of a concrete function on a device, and returns the names of its results."""

        def calls(*arguments):
            return function(*arguments)

        described = _traced(calls, [tf.TensorSpec(each.shape, each.dtype) for each in function.inputs])
        graph_def = described.graph.as_graph_def(add_shapes=True)
        (call,) = (node for node in graph_def.node if node.op in _CALL_OPS)
        node = self._graph_def.node.add()
        node.CopyFrom(call)
        node.name, node.device = name, device or node.device
        del node.input[:]
        node.input.extend(inputs)
        self._graph_def.library.MergeFrom(graph_def.library)
        return [f"{name}:{index}" for index in range(len(function.outputs))]

    def _converted(self, unit: int, conversion: str, source: str, device: str) -> str:
        if self._nodes[conversion].op == "Identity" and len(self._nodes[conversion].input) == 1:
            return source
        node = self._graph_def.node.add()
        node.CopyFrom(self._nodes[conversion])
        node.device = device or node.device
        node.name, node.input[0] = f"{PREFIX}_{unit}/{conversion}/of_{node_of(source).replace('/', '_')}", source
        return node.name

    def add(self, op: str, name: str, inputs: Sequence[str], *, device: str = "") -> node_def_pb2.NodeDef:
        """Adds an operation without attributes, and returns it."""
        return self._graph_def.node.add(op=op, name=name, input=inputs, device=device)

    def finished(self, outputs: Sequence[str]) -> FlatGraph:
        """The finished graph, without the parameters and conversions that nothing reads any more."""
        # Uses now read gathered values, so only conversions that nothing reads still read a parameter.
        while more := {node.name for node in self._graph_def.node if self._reads_unread(node)} - self._unread:
            self._unread |= more
        kept = [node for node in self._graph_def.node if node.name not in self._unread]
        graph_def = tf.compat.v1.GraphDef(versions=self._graph_def.versions, library=self._graph_def.library)
        graph_def.node.extend(kept)
        for node in graph_def.node:
            # The attribute names operations to be colocated with, which may be gone. All nodes have devices.
            node.attr.pop("_class", None)
            left = [one for one in node.input if not (one.startswith("^") and one[1:] in self._unread)]
            if len(left) < len(node.input):
                del node.input[:]
                node.input.extend(left)
        parts = [f"{name}:0" for names in self.parts for name in names]
        rest = self._flat.inputs[len(self.parts) :]
        return self._flat._replace(graph_def=graph_def, inputs=[*parts, *rest], outputs=outputs)

    def _reads_unread(self, node) -> bool:
        return any(node_of(one) in self._unread for one in node.input if not one.startswith("^"))
