"""A pass of a tower, or of all towers of a process, as a graph that gathers parameters unit by unit."""

import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.errors import UserError
from towers.gathering.copied import units_of_all
from towers.gathering.exchange import Gradient, OwnPart, UnitExchange, calls_of
from towers.gathering.rewired import Parts, with_exchange, with_gathers
from towers.gathering.units import units_of
from towers.gathering.uses import device_of, uses_of
from towers.owners import Slices
from towers.per_tower import PerTower, of_tower
from towers.task import Batch
from towers.together.copies_in_one import copies_in_one
from towers.tracing.copied_graphs import traced_alone
from towers.tracing.flat_graph import Change, FlatGraph, flat_graph, node_of
from towers.tracing.traced_once import batch_key, specs_of


class GatheredOnce:
    """Called as a `TracedOnce`; the first argument is the list of parameters on their owners.

    The forward pass and the backward pass each gather a parameter, one unit ahead, and then free it
    (`towers.gathering.units`). So no device ever holds all parameters, and nothing is computed twice except casts.

    Owners may be other processes: the parameters are then `OwnPart`s, and instead of a parameter's gradient the
    result has a list: this process's part of the sum over all processes, or empty.

    A tower of several devices gathers on each device what that device's operations read.

    Several towers are one graph, in which each call to other processes serves them all. Arguments that differ
    between towers, and all results but gradients, are then `PerTower`; gradients are sums over the towers.

    Attributes:
      graphs: a `GatheredGraph` for each spec of the batch.
    """

    def __init__(
        self,
        function,
        *,
        xla: bool = False,
        change: Change | None = None,
        exchange: UnitExchange | None = None,
        devices: Sequence[str] = (),
        others: Sequence[Sequence[str]] = (),
        is_optimized: bool = False,
        graph: Callable = traced_alone,
    ):
        """Args:
        function, change: as for `TracedOnce`.
        xla: must be False.
        exchange: exchange between the processes that own the parameters; None if this process owns all.
        devices: devices of a tower of several devices, on which the function places its operations; operations
          without a device are on the first one. Empty for a tower of one device, the current one.
        others: the devices of each further tower of this process, in the order of `devices`; needs an exchange.
        is_optimized: whether the function consists of graphs that are already optimized.
        graph: as for `TracedOnce`.

        Raises:
          UserError: `xla` is True: a compiled graph reads all its arguments before it begins.
        """
        if xla:
            raise UserError(
                "zero=3 with xla=True: XLA needs all parameters before it begins, and can't gather them layer "
                "by layer; use zero=2, or xla=False"
            )
        # Gradients that are sent to other processes must be dense.
        function = function if exchange is None else _with_dense_gradients(function)
        self._function, self._change = tf.function(function, autograph=False), change
        assert exchange is not None or not others
        self._exchange, self._is_optimized = exchange, is_optimized
        self._towers = [tuple(devices), *map(tuple, others)]
        self._graph = graph
        self.graphs: dict[str, GatheredGraph] = {}

    def __call__(self, parameters: Sequence[tf.Tensor | Slices | OwnPart], *rest):
        specs = specs_of([of_tower(value, 0) for value in rest])
        key = batch_key(specs)
        if key not in self.graphs:
            wholes = [_whole_of(value) for value in parameters]
            concrete, flat = self._graph(key, lambda: self._traced(wholes, specs))
            self.graphs[key] = GatheredGraph(
                concrete, flat, parameters, specs, exchange=self._exchange, towers=self._towers
            )
        return self.graphs[key](parameters, *rest)

    def _traced(self, wholes: Sequence[tf.TensorSpec], specs: Sequence):
        concrete = self._function.get_concrete_function(wholes, *specs)
        flat = flat_graph(concrete, self._change, is_optimized=self._is_optimized)
        return concrete, flat.without_dead_nodes()


class GatheredGraph:
    """The graph for one spec of the batch.

    Attributes:
      units: the uses that each gather serves, those of the first tower first.
      calls: the calls to other processes, in order.
      num_bytes: bytes of each parameter.
      flat: the graph with the gathers.
    """

    def __init__(
        self,
        concrete,
        flat: FlatGraph,
        parameters: Sequence,
        specs: Sequence,
        *,
        exchange: UnitExchange | None,
        towers: Sequence[Sequence[str]],
    ):
        """Args:
        concrete: the function of whole parameters.
        flat: its graph.
        parameters: parameters on their owners.
        specs: specs of its other arguments.
        exchange: as for `GatheredOnce`.
        towers: the devices of each tower, as for `GatheredOnce`.
        """
        devices = towers[0]
        wholes = [_whole_of(value) for value in parameters]
        self._results, self._captured = [concrete.structured_outputs], concrete.captured_inputs
        names = [node_of(name) for name in flat.inputs]
        outputs = [node_of(name) for name in flat.outputs]
        gradients = list(itertools.compress(range(len(outputs)), _are_gradients(self._results[0])))
        uses, levels = uses_of(
            flat.graph_def,
            names[: len(wholes)],
            batch=_of_batch(specs, names[len(wholes) :]),
            outputs=outputs,
            gradients={outputs[position] for position in gradients},
            devices=devices,
        )
        self.num_bytes = [spec.dtype.size * spec.shape.num_elements() for spec in wholes]
        small_bytes = 0 if exchange is None else exchange.small_bytes
        self.units = units_of(uses, self.num_bytes, small_bytes=small_bytes)
        self.calls = []
        if exchange is None:
            self.flat = with_gathers(flat, [_parts_of(value) for value in parameters], self.units)
        else:
            nodes = {node.name: node for node in flat.graph_def.node}
            leaving = [
                Gradient(levels[outputs[position]], index, device_of(nodes[outputs[position]], devices))
                for index, position in enumerate(gradients)
            ]
            self.calls = calls_of(self.units, leaving, self.num_bytes, bytes_per_call=exchange.bytes_per_call)
            self.units = units_of_all(self.units, towers)
            of_towers = [
                [position + tower * len(outputs) for tower in range(len(towers))] for position in gradients
            ]
            self.flat, self._called = with_exchange(
                copies_in_one(flat, towers, len(wholes)), parameters, self.units, self.calls, exchange, of_towers
            )
            self._results = self._results * len(towers)
            if gradients:
                own = [[None] * len(value.parts) for value in parameters]
                self._results = [
                    result._replace(gradients=own if tower == 0 else [])
                    for tower, result in enumerate(self._results)
                ]
        parts = [part for value in parameters for part in _tensors(value)]
        of_tower_0 = concrete.inputs[len(wholes) :]
        given = [tf.TensorSpec(each.shape, each.dtype) for each in (*parts, *of_tower_0 * len(towers))]
        self._graph = self.flat.function(given)

    def __call__(self, parameters, *rest):
        flat = [part for value in parameters for part in _tensors(value)]
        for tower in range(len(self._results)):
            own = [of_tower(value, tower) for value in rest]
            flat += [*tf.nest.flatten(own, expand_composites=True), *self._captured]
        found = tf.nest.pack_sequence_as(self._results, self._graph(*flat), expand_composites=True)
        return found[0] if len(found) == 1 else _together(found)


def _together(of_towers: Sequence):
    """One result, all `PerTower` except the gradients, for which the first tower has the sums over all towers."""
    first = of_towers[0]
    kept = {"gradients": first.gradients} if "gradients" in first._fields else {}
    joined = {name: PerTower([getattr(each, name) for each in of_towers]) for name in first._fields}
    return first._replace(**joined | kept)


def _with_dense_gradients(function):
    def dense(*arguments):
        result = function(*arguments)
        if "gradients" not in result._fields:
            return result
        return result._replace(gradients=[_dense(gradient) for gradient in result.gradients])

    return dense


def _dense(gradient) -> tf.Tensor:
    """A gradient as a dense tensor, on the device that computed it."""
    with tf.device(gradient.device):
        return tf.convert_to_tensor(gradient)


def _whole_of(value: tf.Tensor | Slices | OwnPart) -> tf.TensorSpec:
    return value.whole if isinstance(value, OwnPart) else specs_of(value)


def _tensors(value: tf.Tensor | Slices | OwnPart) -> Sequence[tf.Tensor]:
    return value.parts if isinstance(value, Slices | OwnPart) else [value]


def _parts_of(value: tf.Tensor | Slices) -> Parts:
    tensors = _tensors(value)
    dimension = value.dimension if isinstance(value, Slices) else 0
    return Parts([tensor.device for tensor in tensors], [tensor.shape for tensor in tensors], dimension)


def _of_batch(specs: Sequence, names: Sequence[str]) -> set[str]:
    """Names of those inputs after the parameters that belong to a batch."""
    left, found = iter(names), set()
    for spec in specs:
        own = [next(left) for _ in tf.nest.flatten(spec, expand_composites=True)]
        if isinstance(spec, Batch):
            found.update(own)
    return found


def _are_gradients(results) -> list[bool]:
    """For each tensor of a `TowerResult` or an `EvaluationResult`, whether it belongs to a gradient."""
    return [
        field == "gradients"
        for field, value in zip(results._fields, results, strict=True)
        for _ in tf.nest.flatten(value, expand_composites=True)
    ]
