"""Graphs for towers of several devices: the first tower's is traced, the others get copies on their devices.

tower 0   traced, optimized    CPU:0 CPU:1
tower 1   the same operations  CPU:2 CPU:3
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.tracing.flat_graph import FlatGraph

# Traces a function; returns the concrete function, and its graph.
Trace = Callable[[], tuple[Callable, FlatGraph]]


def traced_alone(key: str, trace: Trace) -> tuple[Callable, FlatGraph]:
    """Traces the function: what `CopiedGraphs.of` does if there is only one tower."""
    return trace()


class CopiedGraphs:
    """The graphs of one function of each tower: all train, or all evaluate."""

    def __init__(self, groups: Sequence[Sequence[str]]):
        """Args:
        groups: the devices of each tower.
        """
        self._groups = groups
        # By key: the first tower's function and graph, and the towers that have not asked for theirs.
        self._waiting: dict[str, tuple[Callable, FlatGraph, set[int]]] = {}

    def of(self, tower: int, key: str, trace: Trace) -> tuple[Callable, FlatGraph]:
        """A function of a tower, and its graph on the tower's devices. Each tower asks once for each key.

        Args:
          tower: index of the tower.
          key: tells the specs of the arguments apart.
          trace: traces the tower's function.
        """
        if tower == 0:
            concrete, flat = trace()
            others = set(range(1, len(self._groups)))
            if others and not _has_placed_blocks(flat):
                self._waiting[key] = concrete, flat, others
            return concrete, flat
        if key not in self._waiting:
            return trace()
        concrete, flat, others = self._waiting[key]
        others.discard(tower)
        if not others:
            # Graphs may be large.
            del self._waiting[key]
        return concrete, self._on_devices_of(tower, flat)

    def _on_devices_of(self, tower: int, flat: FlatGraph) -> FlatGraph:
        first, own = self._groups[0], self._groups[tower]
        graph_def = tf.compat.v1.GraphDef()
        graph_def.CopyFrom(flat.graph_def)
        for node in graph_def.node:
            node.device = counterpart(node.device, first, own)
        return flat._replace(graph_def=graph_def)


def counterpart(device: str, first: Sequence[str], own: Sequence[str]) -> str:
    """The device of a tower that corresponds to one of the first tower's; other devices, and '', stay."""
    index = index_of(device, first)
    return device if index is None else own[index]


def index_of(device: str, devices: Sequence[str]) -> int | None:
    """The index in `devices` of a device of a graph; None if it is none of them."""
    # The optimizer may write a device's name in full.
    return next((index for index, one in enumerate(devices) if device.endswith(one)), None)


def _has_placed_blocks(flat: FlatGraph) -> bool:
    """Whether functions that the graph calls (loops, branches) name devices: copies would share these."""
    return any(node.device for function in flat.graph_def.library.function for node in function.node_def)
