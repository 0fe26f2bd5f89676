"""One graph with a copy of a tower's graph for each of several towers, on its devices."""

from collections.abc import Sequence

import tensorflow as tf

from towers.timeline.activities import tower_scope
from towers.tracing.copied_graphs import counterpart
from towers.tracing.flat_graph import FlatGraph, node_of


def copies_in_one(flat: FlatGraph, towers: Sequence[Sequence[str]], num_shared: int = 0) -> FlatGraph:
    """The graph of all towers.

    Args:
      flat: the graph of the first tower. With a single tower it is returned unchanged.
      towers: the devices of each tower.
      num_shared: number of its first inputs that all towers share. Inputs of the new graph are these, then the
        other inputs tower by tower; outputs are in order of towers.
    """
    if len(towers) == 1:
        return flat
    shared = {node_of(name) for name in flat.inputs[:num_shared]}
    graph_def = tf.compat.v1.GraphDef(versions=flat.graph_def.versions, library=flat.graph_def.library)
    graph_def.node.extend(node for node in flat.graph_def.node if node.name in shared)
    inputs, outputs, effects = list(flat.inputs[:num_shared]), [], []
    for tower in range(len(towers)):
        for node in flat.graph_def.node:
            if node.name not in shared:
                _add_copy(graph_def, node, tower, towers, shared)
        inputs += [name_in(tower, name) for name in flat.inputs[num_shared:]]
        outputs += [name if node_of(name) in shared else name_in(tower, name) for name in flat.outputs]
        effects += [name_in(tower, name) for name in flat.effects]
    return FlatGraph(graph_def, inputs, outputs, effects)


def _add_copy(graph_def: tf.compat.v1.GraphDef, node, tower: int, towers, shared: set[str]) -> None:
    copy = graph_def.node.add()
    copy.CopyFrom(node)
    copy.name, copy.device = name_in(tower, node.name), device_in(tower, node.device, towers)
    # The attribute names operations to be colocated with. All have their devices.
    copy.attr.pop("_class", None)
    copy.input[:] = [source if node_of(source) in shared else name_in(tower, source) for source in node.input]


def device_in(tower: int, device: str, towers: Sequence[Sequence[str]]) -> str:
    """The device of a tower that corresponds to one of the first tower's ('' is its first); other devices stay."""
    own = towers[tower]
    return counterpart(device, towers[0], own) if device else own[0]


def name_in(tower: int, name: str) -> str:
    """The name of a node, a tensor or a control input in the copy for a tower."""
    scope = f"{tower_scope(tower)}/"
    return f"^{scope}{name[1:]}" if name.startswith("^") else f"{scope}{name}"
