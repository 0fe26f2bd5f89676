"""A pure function of tensors as a graph that is traced once, optimized once and called on many devices.

TensorFlow's graph optimizer works on the graph that is called from Python: the whole step, which contains one copy
of the tower for each device. It optimizes each copy separately. If `towers.device_setup` has disabled it, the
tower's graph is optimized here instead, once, before it is copied: the first step of eight towers takes 1.15 times
as long as that of one, instead of 2 to 2.4 times. Without any optimizer all later steps would be 5 to 12% slower.
Towers that are not inlined into the step's graph (`_noinline`) make the first step longer: 6.4 s instead of 4.3.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.layers.table_rows import TableRows
from towers.owners import Slices, whole
from towers.task import Batch
from towers.tracing import graph_optimizer
from towers.tracing.flat_graph import Change, FlatGraph, flat_graph


class TracedOnce:
    """A function that is traced once for each spec of its batch, whose dimension 0 is open."""

    def __init__(
        self,
        function,
        *,
        xla: bool = False,
        change: Change | None = None,
        graph: Callable | None = None,
    ):
        """Args:
        function: takes tensors, lists of them, `Batch` and `TableRows`; returns a structure of tensors. All
          arguments except `Batch` and `TableRows` have the same shapes in every call. Calls may give `Slices` in a
          list, which are joined on the current device.
        xla: compile it with XLA.
        change: changes the traced graph's description in place, before it is optimized; None for no change. Not
          with XLA.
        graph: returns the graph of a tower of several devices, given a key and a function that traces it, as
          `towers.tracing.copied_graphs.CopiedGraphs.of` does; None traces each function. Not with XLA.
        """
        self._graph = graph
        self._function = tf.function(function, jit_compile=xla or None, autograph=False)
        self._xla, self._change = xla, change
        self._concrete = {}

    def __call__(self, *arguments):
        arguments = [joined(argument) for argument in arguments]
        specs = specs_of(arguments)
        batch = batch_key(specs)
        if batch not in self._concrete:
            self._concrete[batch] = self._traced(batch, specs)
        return self._concrete[batch](*arguments)

    def _traced(self, batch: str, specs):
        if self._graph is not None:
            return _with_graph(*self._graph(batch, lambda: self._flat(specs)))
        concrete = self._function.get_concrete_function(*specs)
        if self._change is None and (self._xla or not graph_optimizer.must_optimize(concrete)):
            return concrete
        return _with_graph(concrete, flat_graph(concrete, self._change))

    def _flat(self, specs):
        concrete = self._function.get_concrete_function(*specs)
        return concrete, flat_graph(concrete, self._change)


def optimized_if_needed(concrete, flat: FlatGraph | None = None):
    """The concrete function, optimized here unless TensorFlow does it; `flat` is its `flat_graph`, if known."""
    if not graph_optimizer.must_optimize(concrete):
        return concrete
    return _with_graph(concrete, flat or flat_graph(concrete))


def joined(argument):
    """The argument; in a list, `Slices` are joined on the current device."""
    return [whole(value) for value in argument] if isinstance(argument, list) else argument


def batch_key(specs: Sequence) -> str:
    """A key for the specs of a batch and for its structure, such as weights () or weights in a tensor."""
    return repr([spec for spec in specs if isinstance(spec, Batch)])


def _with_graph(concrete, flat: FlatGraph):
    """A function with the arguments and results of `concrete` that computes another graph."""
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in concrete.inputs]
    graph = flat.function(specs)

    def call(*arguments):
        found = graph(*tf.nest.flatten(arguments, expand_composites=True), *concrete.captured_inputs)
        return tf.nest.pack_sequence_as(concrete.structured_outputs, found, expand_composites=True)

    return call


def specs_of(argument):
    """The arguments' specs. Dimension 0 of a batch and of a table's rows is open: one trace serves all lengths."""
    if isinstance(argument, Batch | TableRows):
        return tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), argument)
    if isinstance(argument, Slices):
        shape = argument.parts[0].shape.as_list()
        shape[argument.dimension] = sum(part.shape[argument.dimension] for part in argument.parts)
        return tf.TensorSpec(shape, argument.parts[0].dtype)
    if isinstance(argument, list | tuple):
        return [specs_of(one) for one in argument]
    return tf.TensorSpec(argument.shape, argument.dtype)
