"""A tower's graph in which each unit's parameters are gathered for it alone.

    on the owners:   Identity(part 0)   Identity(part 1)   each waits for the unit before the last
                                 \       /
    on the tower:                 Concat  ->  operations of the unit

What waits is the sending: a part that waited on the tower's side would already be there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from towers.gathering.units import Use
from towers.gathering.uses import node_of
from towers.traced_once import FlatGraph

PREFIX = "gather_of_unit"


class Parts(NamedTuple):
    """The parts of a parameter.

    Attributes:
      devices: the owner of each part.
      shapes: of the parts.
      dimension: dimension along which they follow each other; any number for a single part.
    """

    devices: Sequence[str]
    shapes: Sequence[tf.TensorShape]
    dimension: int = 0


def with_gathers(flat: FlatGraph, parameters: Sequence[Parts], units: Sequence[Sequence[Use]]) -> FlatGraph:
    """The graph with a gather for each unit of uses; its first inputs are the parts of all parameters."""
    rewiring = _Rewiring(flat, parameters)
    for index, unit in enumerate(units):
        rewiring.gather(index, unit, after=units[index - 2] if index >= 2 else [])
    return rewiring.finished()


class _Rewiring:
    def __init__(self, flat: FlatGraph, parameters: Sequence[Parts]):
        self._flat, self._parameters = flat, parameters
        self._graph_def = tf.compat.v1.GraphDef()
        self._graph_def.CopyFrom(flat.graph_def)
        self._nodes = {node.name: node for node in self._graph_def.node}
        self._whole = [node_of(name) for name in flat.inputs[: len(parameters)]]
        self._parts = [self._placeholders(*described) for described in zip(self._whole, parameters, strict=True)]
        self._unread = {name for name, parts in zip(self._whole, self._parts, strict=True) if parts != [name]}

    def _placeholders(self, name: str, parts: Parts) -> list[str]:
        """Names of the placeholders of a parameter's parts."""
        if len(parts.shapes) == 1:
            return [name]
        found = []
        for index, shape in enumerate(parts.shapes):
            node = self._graph_def.node.add()
            node.CopyFrom(self._nodes[name])
            node.name = f"{name}_part_{index}"
            node.attr["shape"].shape.CopyFrom(shape.as_proto())
            node.attr.pop("_output_shapes", None)
            found.append(node.name)
        return found

    def gather(self, index: int, unit: Sequence[Use], *, after: Sequence[Use]) -> None:
        """Adds the gather of a unit, which waits for the operations of `after`, and gives it to the unit."""
        waits = []
        if after:
            wait = self._add("NoOp", f"{PREFIX}_{index}/wait", sorted({f"^{use.node}" for use in after}))
            waits = [f"^{wait.name}"]
        gathered: dict[tuple, str] = {}
        for use in unit:
            if (use.parameter,) not in gathered:
                gathered[use.parameter,] = self._gathered(index, use.parameter, waits)
            source = gathered[use.parameter,]
            for position, conversion in enumerate(use.through):
                key = (use.parameter, *use.through[: position + 1])
                if key not in gathered:
                    gathered[key] = self._converted(index, conversion, source)
                    self._unread.add(conversion)
                source = gathered[key]
            self._nodes[use.node].input[use.position] = source

    def _gathered(self, unit: int, parameter: int, waits: Sequence[str]) -> str:
        """Name of the node that has a parameter's value on the tower's device."""
        parts, name = self._parameters[parameter], f"{PREFIX}_{unit}/{parameter}"
        dtype = self._nodes[self._whole[parameter]].attr["dtype"].type
        sent = []
        for index, (device, source) in enumerate(zip(parts.devices, self._parts[parameter], strict=True)):
            node = self._add("Identity", f"{name}/part_{index}", [source, *waits], device=device)
            node.attr["T"].type = dtype
            sent.append(node.name)
        if len(sent) == 1:
            return sent[0]
        axis = self._add("Const", f"{name}/axis", [])
        axis.attr["dtype"].type = tf.int32.as_datatype_enum
        axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(parts.dimension, tf.int32))
        node = self._add("ConcatV2", name, [*sent, axis.name])
        node.attr["N"].i = len(sent)
        node.attr["T"].type, node.attr["Tidx"].type = dtype, tf.int32.as_datatype_enum
        return name

    def _converted(self, unit: int, conversion: str, source: str) -> str:
        node = self._graph_def.node.add()
        node.CopyFrom(self._nodes[conversion])
        node.name, node.input[0] = f"{PREFIX}_{unit}/{conversion}/of_{node_of(source).replace('/', '_')}", source
        return node.name

    def _add(self, op: str, name: str, inputs: Sequence[str], *, device: str = "") -> node_def_pb2.NodeDef:
        return self._graph_def.node.add(op=op, name=name, input=inputs, device=device)

    def finished(self) -> FlatGraph:
        """The graph without the parameters and conversions that nothing reads any more."""
        # Uses read gathers now, so what still reads a parameter is a conversion that nothing reads.
        while more := {node.name for node in self._graph_def.node if self._reads_unread(node)} - self._unread:
            self._unread |= more
        kept = [node for node in self._graph_def.node if node.name not in self._unread]
        graph_def = tf.compat.v1.GraphDef(versions=self._graph_def.versions, library=self._graph_def.library)
        graph_def.node.extend(kept)
        for node in graph_def.node:
            left = [one for one in node.input if not (one.startswith("^") and one[1:] in self._unread)]
            if len(left) < len(node.input):
                del node.input[:]
                node.input.extend(left)
        parts = [f"{name}:0" for names in self._parts for name in names]
        return self._flat._replace(graph_def=graph_def, inputs=[*parts, *self._flat.inputs[len(self._parts) :]])

    def _reads_unread(self, node) -> bool:
        return any(node_of(one) in self._unread for one in node.input if not one.startswith("^"))
