"""How many bytes of gathered parameters a tower's graph can have alive, in the worst order of its operations."""

import tensorflow as tf

from towers.gathering.gathered_once import GatheredGraph
from towers.gathering.rewired import PREFIX
from towers.timeline.activities import activity_of
from towers.tracing.flat_graph import node_of


def peak_bytes(graph: GatheredGraph, device: str = "", *, waits: bool = True) -> int:
    """The peak of gathered bytes on a device if every gather runs as soon as it can, before everything else.

    Args:
      graph: a tower's graph.
      device: the device that uses the gathered parameters; '' for a tower of one device.
      waits: whether gathers wait as the graph says; otherwise they depend on nothing.
    """
    inputs = {node.name: {node_of(source) for source in node.input} for node in graph.flat.graph_def.node}
    if not waits:
        inputs = {name: {one for one in sources if not one.endswith("/wait")} for name, sources in inputs.items()}
    readers: dict[str, set[str]] = {name: set() for name in inputs}
    for name, sources in inputs.items():
        for source in sources:
            readers[source].add(name)
    sizes: dict[str, int] = {}
    for node in graph.flat.graph_def.node:
        is_here = _device_of(graph, node.name) == device
        size = _gathered_bytes(graph, node.name, inputs) or _converted_bytes(node, sizes)
        sizes[node.name] = size if is_here else 0
    missing = {name: set(sources) for name, sources in inputs.items()}
    unread = {name: set(following) for name, following in readers.items()}
    ready = [name for name, sources in missing.items() if not sources]
    alive = peak = num_run = 0
    while ready:
        # First gathers, then as much of the first tower as can run before the others.
        ready.sort(key=lambda name: (not name.startswith(PREFIX), activity_of(name).tower or 0))
        name = ready.pop(0)
        num_run += 1
        alive += sizes[name]
        peak = max(peak, alive)
        for source in inputs[name]:
            unread[source].discard(name)
            alive -= 0 if unread[source] else sizes[source]
        for reader in readers[name]:
            missing[reader].discard(name)
            if not missing[reader]:
                ready.append(reader)
    assert num_run == len(inputs), "some operations wait for ever"
    return peak


def _device_of(graph: GatheredGraph, name: str) -> str | None:
    """The device of the unit that an operation gathers; None for any other operation."""
    unit = name.partition("/")[0]
    return graph.units[int(unit.removeprefix(f"{PREFIX}_"))][0].device if unit.startswith(PREFIX) else None


def _gathered_bytes(graph: GatheredGraph, name: str, names) -> int:
    """Bytes of a gathered parameter on the tower, or of all parameters of a call; 0 for any other operation."""
    unit, _, rest = name.partition("/")
    if unit.startswith(PREFIX) and rest == "call":
        (call,) = (call for call in graph.calls if f"{PREFIX}_{call.unit}" == unit)
        return sum(graph.num_bytes[parameter] for parameter in call.parameters)
    parameter, _, kind = rest.partition("/")
    is_gather = unit.startswith(PREFIX) and parameter.isdecimal() and kind in ("", "part_0")
    is_sent_slice = bool(kind) and f"{unit}/{parameter}" in names
    return graph.num_bytes[int(parameter)] if is_gather and not is_sent_slice else 0


def _converted_bytes(node, sizes) -> int:
    """Bytes of the result of a gather's conversion; 0 for any other operation."""
    if not node.name.startswith(PREFIX) or "/of_" not in node.name:
        return 0
    whole = sizes[node_of(node.input[0])]
    if node.op != "Cast":
        return whole
    return whole * tf.as_dtype(node.attr["DstT"].type).size // tf.as_dtype(node.attr["SrcT"].type).size
