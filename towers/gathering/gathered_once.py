"""A pass of a tower as a graph that gathers parameters from their owners unit by unit."""

import itertools
from collections.abc import Sequence

import tensorflow as tf

from towers.errors import UserError
from towers.gathering.exchange import Gradient, OwnPart, UnitExchange, calls_of
from towers.gathering.rewired import Parts, with_exchange, with_gathers
from towers.gathering.units import units_of
from towers.gathering.uses import device_of, node_of, uses_of
from towers.owners import Slices
from towers.task import Batch
from towers.traced_once import Change, FlatGraph, batch_key, flat_graph, specs_of


class GatheredOnce:
    """Called as `towers.traced_once.TracedOnce`; the first argument is the list of parameters on their owners.

    The forward pass and the backward pass each gather a parameter for themselves, one unit ahead, and then free it
    (`towers.gathering.units`). So no device ever has all parameters, and nothing is computed twice except casts.

    Owners may be other processes: the parameters are then `OwnPart`s, and in place of a parameter's gradient the
    result has a list, of this process's part of the sum over all processes or of nothing.

    A tower of several devices gathers on each of them what its operations read.

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
        is_optimized: bool = False,
    ):
        """Args:
        function, change: as for `TracedOnce`.
        xla: must be False.
        exchange: between the processes that have the parameters; None if they are on devices of this one.
        devices: of a tower of several devices, on which the function puts its operations; the first one has those
          that it puts nowhere. Empty for a tower of one device.
        is_optimized: whether the function consists of graphs that are optimized.

        Raises:
          UserError: `xla`: a compiled graph reads its arguments before it begins.
        """
        if xla:
            raise UserError(
                "zero=3 with xla=True: XLA needs all parameters before it begins, and can't gather them layer "
                "by layer; use zero=2, or xla=False"
            )
        # What leaves for other processes is dense.
        function = function if exchange is None else _with_dense_gradients(function)
        self._function, self._change = tf.function(function, autograph=False), change
        self._exchange, self._devices, self._is_optimized = exchange, tuple(devices), is_optimized
        self.graphs: dict[str, GatheredGraph] = {}

    def __call__(self, parameters: Sequence[tf.Tensor | Slices | OwnPart], *rest):
        specs = specs_of(rest)
        key = batch_key(specs)
        if key not in self.graphs:
            concrete = self._function.get_concrete_function([_whole_of(value) for value in parameters], *specs)
            flat = flat_graph(concrete, self._change, is_optimized=self._is_optimized).without_dead_nodes()
            self.graphs[key] = GatheredGraph(
                concrete, flat, parameters, specs, exchange=self._exchange, devices=self._devices
            )
        return self.graphs[key](parameters, *rest)


class GatheredGraph:
    """The graph for one spec of the batch.

    Attributes:
      units: the uses that each gather serves.
      calls: the calls to other processes, in order.
      num_bytes: of each parameter.
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
        devices: Sequence[str],
    ):
        """Args:
        concrete: the function of whole parameters.
        flat: its graph.
        parameters: on their owners.
        specs: of its other arguments.
        exchange, devices: as for `GatheredOnce`.
        """
        wholes = [_whole_of(value) for value in parameters]
        self._results, self._captured = concrete.structured_outputs, concrete.captured_inputs
        names = [node_of(name) for name in flat.inputs]
        outputs = [node_of(name) for name in flat.outputs]
        gradients = list(itertools.compress(range(len(outputs)), _are_gradients(self._results)))
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
            self.flat, self._called = with_exchange(flat, parameters, self.units, self.calls, exchange, gradients)
            if gradients:
                self._results = self._results._replace(
                    gradients=[[None] * len(value.parts) for value in parameters]
                )
        parts = [part for value in parameters for part in _tensors(value)]
        given = [tf.TensorSpec(each.shape, each.dtype) for each in (*parts, *concrete.inputs[len(wholes) :])]
        self._graph = self.flat.function(given)

    def __call__(self, parameters, *rest):
        parts = [part for value in parameters for part in _tensors(value)]
        flat = tf.nest.flatten(rest, expand_composites=True)
        found = self._graph(*parts, *flat, *self._captured)
        return tf.nest.pack_sequence_as(self._results, found, expand_composites=True)


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
    """Names of the inputs that are a batch, of those after the parameters."""
    left, found = iter(names), set()
    for spec in specs:
        own = [next(left) for _ in tf.nest.flatten(spec, expand_composites=True)]
        if isinstance(spec, Batch):
            found.update(own)
    return found


def _are_gradients(results) -> list[bool]:
    """For each tensor of a `TowerResult` or an `EvaluationResult` whether it is of a gradient."""
    return [
        field == "gradients"
        for field, value in zip(results._fields, results, strict=True)
        for _ in tf.nest.flatten(value, expand_composites=True)
    ]
