"""The graphs that TensorFlow really ran: after placement, optimisation and division by device."""

import collections
import contextlib
import dataclasses

from tensorflow.python.eager import context


@dataclasses.dataclass
class PartitionedGraphs:
    """Nodes of every function that ran for the first time within `recorded_graphs`."""

    nodes: list = dataclasses.field(default_factory=list)

    def devices_of(self, *parts: str) -> collections.Counter:
        """Number of operations on each device ('CPU:0') whose type contains any of `parts`."""
        return collections.Counter(
            _short(node.device) for node in self.nodes if any(part in node.op for part in parts)
        )

    def copies(self, source: str, target: str) -> collections.Counter:
        """How often each read value of a variable is sent from device `source` to device `target`.

        Control edges between devices are sent too, as constants: these do not count.
        """
        sent = [node for pair, node in self._sent() if pair == (source, target)]
        return collections.Counter(node.name for node in sent if node.op == "ReadVariableOp")

    def num_sent(self) -> collections.Counter:
        """How many tensors each (source, target) sends, without control edges, which are sent as constants."""
        return collections.Counter(pair for pair, node in self._sent() if node.op != "Const")

    def _sent(self) -> list:
        """(source, target) and the node that computes the tensor, for everything that is sent."""
        by_name = {(_short(node.device), node.name): node for node in self.nodes}
        return [
            ((_short(node.device), _receiver(node)), _origin(node, by_name))
            for node in self.nodes
            if node.op == "_Send"
        ]


@contextlib.contextmanager
def recorded_graphs():
    """Context manager: yields the graphs of the functions that run for the first time while it is active."""
    found = PartitionedGraphs()
    context.enable_graph_collection()
    try:
        yield found
        for graph in context.export_run_metadata().partition_graphs:
            found.nodes.extend(graph.node)
    finally:
        context.disable_graph_collection()


def _origin(node, by_name):
    """The node that computes a sent tensor, looking through Identity nodes."""
    node = by_name[_short(node.device), node.input[0].partition(":")[0]]
    return _origin(node, by_name) if node.op == "Identity" else node


def _short(device: str) -> str:
    return device.rpartition("device:")[2]


def _receiver(node) -> str:
    return _short(node.attr["recv_device"].s.decode())
