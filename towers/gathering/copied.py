"""The towers of a process as one graph: a copy of the first tower's graph on the devices of each.

    gather of a unit --+--> tower 0, CPU:0 --+
                       |                     +--> sum --> scatter of gradients
                       +--> tower 1, CPU:1 --+

So a process gathers each unit once and sends each gradient once, whatever its number of towers. Units and calls
are those of the first tower: processes with other numbers of towers make the same ones.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.gathering.units import Use
from towers.timeline.activities import tower_scope
from towers.tracing.copied_graphs import counterpart
from towers.tracing.flat_graph import FlatGraph, node_of


class CopiedTowers:
    """How the graph of a process's first tower is copied for its other towers."""

    def __init__(self, towers: Sequence[Sequence[str]]):
        """Args:
        towers: the devices of each tower. The graph of a single one stays as it is.
        """
        self._towers = towers

    def graph(self, flat: FlatGraph, num_shared: int) -> FlatGraph:
        """The graph of all towers.

        Args:
          flat: that of the first tower.
          num_shared: number of its first inputs, which all towers share. Inputs and outputs of the new graph are
            these, then the others of each tower.
        """
        if len(self._towers) == 1:
            return flat
        shared = {node_of(name) for name in flat.inputs[:num_shared]}
        graph_def = tf.compat.v1.GraphDef(versions=flat.graph_def.versions, library=flat.graph_def.library)
        graph_def.node.extend(node for node in flat.graph_def.node if node.name in shared)
        inputs, outputs, effects = list(flat.inputs[:num_shared]), [], []
        for tower in range(len(self._towers)):
            for node in flat.graph_def.node:
                if node.name not in shared:
                    self._add_copy(graph_def, node, tower, shared)
            inputs += [_name_in(tower, name) for name in flat.inputs[num_shared:]]
            outputs += [name if node_of(name) in shared else _name_in(tower, name) for name in flat.outputs]
            effects += [_name_in(tower, name) for name in flat.effects]
        return FlatGraph(graph_def, inputs, outputs, effects)

    def _add_copy(self, graph_def: tf.compat.v1.GraphDef, node, tower: int, shared: set[str]) -> None:
        copy = graph_def.node.add()
        copy.CopyFrom(node)
        copy.name, copy.device = _name_in(tower, node.name), self._device_of(tower, node.device)
        # Which operations it should be beside, by name. All have their devices.
        copy.attr.pop("_class", None)
        copy.input[:] = [source if node_of(source) in shared else _name_in(tower, source) for source in node.input]

    def units(self, units: Sequence[Sequence[Use]]) -> list[list[Use]]:
        """The uses that each gather serves, in all towers; those of the first tower begin each unit."""
        if len(self._towers) == 1:
            return [list(unit) for unit in units]
        return [[self._use(use, tower) for tower in range(len(self._towers)) for use in unit] for unit in units]

    def _use(self, use: Use, tower: int) -> Use:
        return use._replace(
            node=_name_in(tower, use.node),
            through=tuple(_name_in(tower, name) for name in use.through),
            device=self._device_of(tower, use.device),
        )

    def _device_of(self, tower: int, device: str) -> str:
        """The device of a tower in place of one of the first tower's; '' is the first one. Others stay."""
        own = self._towers[tower]
        return counterpart(device, self._towers[0], own) if device else own[0]


def _name_in(tower: int, name: str) -> str:
    """The name of a node, a tensor or a control input in the copy for a tower."""
    scope = f"{tower_scope(tower)}/"
    return f"^{scope}{name[1:]}" if name.startswith("^") else f"{scope}{name}"
