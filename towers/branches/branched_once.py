"""A pass of a tower as a graph whose branches are on different devices."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.branches.operation_devices import operation_devices
from towers.branches.placed_run import PlacedRun
from towers.branches.plan import BranchPlan
from towers.layers.shadowing import shadowed
from towers.stages.marks import Marks
from towers.tracing.flat_graph import Change
from towers.tracing.traced_once import TracedOnce


class BranchedOnce:
    """Makes the graphs of a tower, as `TracedOnce` does. The first argument of each function is the parameters.

    The pass is traced once, forward, loss and backward, as on one device; then its operations get their devices.
    """

    def __init__(
        self,
        plan: BranchPlan,
        devices: Sequence[str],
        parameter_devices: Sequence[int],
        group_keys: Sequence[int] = (),
        once: Callable = TracedOnce,
    ):
        """Args:
        plan: plan of the model.
        devices: the tower's devices by index.
        parameter_devices: for each parameter the index of the device that has it.
        group_keys: for each device the group key of its exchanges with the same device of the other towers; empty
          without exchanges.
        once: makes a graph of a function, as `TracedOnce` does.
        """
        self._once = once
        self._plan, self._devices, self._parameters = plan, tuple(devices), tuple(parameter_devices)
        self._group_keys = tuple(group_keys)
        self._marks: dict[tf.Graph, Marks] = {}

    def __call__(self, function: Callable, *, xla: bool = False, change: Change | None = None) -> Callable:
        """The function as a graph. `xla` must be False: `check_grouped` refuses it for branches."""
        assert not xla

        def placed(graph: tf.Graph, graph_def: tf.compat.v1.GraphDef) -> None:
            self._place(graph, graph_def)
            if change is not None:
                # Copies that it makes get the device of the original.
                change(graph, graph_def)

        def marked(*arguments):
            graph = tf.compat.v1.get_default_graph()
            marks = self._marks[graph] = Marks(graph)
            runs = [
                (functional, "_run_through_graph", PlacedRun(functional, self._plan.homes, marks))
                for functional in self._plan.functionals
            ]
            with shadowed(runs):
                return function(*arguments)

        return self._once(marked, change=placed)

    def _place(self, graph: tf.Graph, graph_def: tf.compat.v1.GraphDef) -> None:
        """Sets the devices of a traced graph's nodes. The optimizer joins no operations of two devices."""
        names = [tensor.op.name for tensor in graph.inputs]
        sources = dict.fromkeys(names) | dict(zip(names, self._parameters, strict=False))
        homes = operation_devices(graph, self._marks.pop(graph).stages(), sources)
        for node in graph_def.node:
            # Nodes that the host computes for GPUs already have a device.
            if node.name in homes and not node.device:
                node.device = self._devices[homes[node.name]]
                # The attribute names operations to be colocated with; all have their devices now.
                node.attr.pop("_class", None)
                if node.op == "CollectiveReduce":
                    # A group is one device of each tower.
                    node.attr["group_key"].i = self._group_keys[homes[node.name]]
