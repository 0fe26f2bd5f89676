"""Which operations of a tower's graph read its parameters, in the order of the computation."""

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence

import tensorflow as tf

from towers.errors import UserError
from towers.gathering.units import Use
from towers.tracing.copied_graphs import index_of
from towers.tracing.flat_graph import node_of

# These operations only convert a parameter. Each unit repeats the conversion: a kept result would be as large.
_CONVERSIONS = ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "Transpose")


def uses_of(
    graph_def: tf.compat.v1.GraphDef,
    parameters: Sequence[str],
    *,
    batch: Collection[str],
    outputs: Collection[str],
    gradients: Collection[str],
    devices: Sequence[str] = (),
) -> tuple[list[Use], Mapping[str, int]]:
    """All uses of the parameters, and the level of each operation by name (`Use.level`).

    An operation that does not depend on the batch (the penalty of a weight, its gradient) could run at any time.
    It runs when its parameter is gathered for another use, or else as late as possible.

    Args:
      graph_def: the graph of a tower.
      parameters: names of the nodes of the parameters.
      batch: names of the nodes of the batch.
      outputs: names of the nodes of all results.
      gradients: names of the nodes of those results that are gradients.
      devices: devices of a tower of several devices; operations without a device are on the first one. Empty for a
        tower of one device.

    Raises:
      UserError: the graph has a loop of TensorFlow 1.
    """
    flow = _Dataflow(graph_def, batch)
    found = [use for index, name in enumerate(parameters) for use in _uses(flow, index, name, outputs)]
    levels = flow.levels({})
    forward = flow.before(set(outputs) - set(gradients))
    floors = _floors(flow, found, levels, forward)
    if floors:
        levels = flow.levels(floors)
    placed = [
        use._replace(level=levels[use.node], device=device_of(flow.nodes[use.node], devices)) for use in found
    ]
    return placed, levels


def device_of(node, devices: Sequence[str]) -> str:
    """The one of a tower's devices that a node is on; '' if `devices` is empty."""
    return devices[index_of(node.device, devices) or 0] if devices else ""


def _uses(flow: "_Dataflow", parameter: int, name: str, outputs: Collection[str]) -> Iterator[Use]:
    waiting: list[tuple[str, tuple[str, ...]]] = [(name, ())]
    while waiting:
        source, through = waiting.pop()
        for reader, position in flow.readers[source]:
            is_conversion = position == 0 and flow.nodes[reader].op in _CONVERSIONS
            if is_conversion and reader not in outputs:
                waiting.append((reader, (*through, reader)))
            else:
                yield Use(0, parameter, reader, position, through)


def _floors(
    flow: "_Dataflow", uses: Sequence[Use], levels: Mapping[str, int], forward: Collection[str]
) -> dict[str, int]:
    """For each use that does not depend on the batch, the level before which it must not run."""
    latest = flow.latest(levels)
    found: dict[str, int] = {}
    for use in uses:
        if use.node in flow.of_batch:
            continue
        others = [
            levels[other.node]
            for other in uses
            if other.parameter == use.parameter
            and other.node in flow.of_batch
            and (other.node in forward) == (use.node in forward)
        ]
        floor = min(others, default=latest[use.node])
        found[use.node] = max(floor, found.get(use.node, 0))
    return found


class _Dataflow:
    """The nodes of a graph in an order in which each follows all that it depends on.

    Attributes:
      nodes: by name, in that order.
      readers: by name, the (node, position of the input) that read it.
      of_batch: names of the nodes that depend on the batch.
    """

    def __init__(self, graph_def, batch: Collection[str]):
        nodes = {node.name: node for node in graph_def.node}
        self._inputs = {name: [node_of(each) for each in node.input] for name, node in nodes.items()}
        self.nodes = {name: nodes[name] for name in self._ordered()}
        self.readers: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
        self.of_batch = set(batch)
        for name, node in self.nodes.items():
            data = [source for source in node.input if not source.startswith("^")]
            for position, source in enumerate(data):
                self.readers[node_of(source)].append((name, position))
            if any(node_of(source) in self.of_batch for source in data):
                self.of_batch.add(name)

    def _ordered(self) -> list[str]:
        missing = {name: len(set(inputs)) for name, inputs in self._inputs.items()}
        followers = collections.defaultdict(list)
        for name, inputs in self._inputs.items():
            for source in set(inputs):
                followers[source].append(name)
        found = [name for name, count in missing.items() if not count]
        for name in found:
            for follower in followers[name]:
                missing[follower] -= 1
                if not missing[follower]:
                    found.append(follower)
        if len(found) < len(missing):
            raise UserError("zero=3: the model has a loop of TensorFlow 1, whose parts have no order; use zero=2")
        return found

    def levels(self, floors: Mapping[str, int]) -> dict[str, int]:
        """The level of each node: the length of the longest path to it, or its floor if that is higher."""
        found: dict[str, int] = {}
        for name in self.nodes:
            after = max((found[source] + 1 for source in self._inputs[name]), default=0)
            found[name] = max(after, floors.get(name, 0))
        return found

    def latest(self, levels: Mapping[str, int]) -> dict[str, int]:
        """For each node that does not depend on the batch, the highest level at which it delays nothing."""
        found, last = dict(levels), max(levels.values())
        for name in reversed(self.nodes):
            if name not in self.of_batch:
                found[name] = min((found[reader] - 1 for reader, _ in self.readers[name]), default=last)
        return found

    def before(self, names: Collection[str]) -> set[str]:
        """These nodes and all that they depend on."""
        found, waiting = set(), list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self._inputs[name]
        return found
