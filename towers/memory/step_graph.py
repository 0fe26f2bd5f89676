"""A traced step as operations with their bytes, for batches of any length."""

import collections

import tensorflow as tf

from towers.memory.graph_operations import GraphOperations
from towers.memory.lifetimes import Operation
from towers.memory.shaped_graph import ARGUMENT, inlined, is_open, shaped
from towers.memory.tensor_kinds import kinds_of

# Minimum size of the batch that, compared with twice as many examples, shows what grows with the batch: no part
# may be empty.
_FEW = 96


class StepGraph:
    """A traced function whose batch has no length yet."""

    def __init__(self, concrete, *, kernel_threads: int = 1):
        """Args:
        concrete: a concrete function; the arguments with an open dimension 0 are its batch.
        kernel_threads: number of threads of an operation.
        """
        self._kernel_threads = kernel_threads
        self._graph_def = inlined(concrete)
        self._arguments = {tensor.op.name: tensor for tensor in concrete.inputs}
        self._results = collections.Counter(tensor.name for tensor in concrete.outputs)
        # Cache of the last graph with known shapes, and of bytes of bodies: a length is requested again for one
        # memory.
        self._last: tuple[int, tf.Graph] | None = None
        self._kinds: dict[str, str] = {}
        self._bodies: dict[tuple, int] = {}

    @property
    def constant_bytes(self) -> int:
        """Bytes of the constants, which live as long as the graph."""
        values = [node.attr["value"].tensor for node in self._graph_def.node if node.op == "Const"]
        return sum(
            tf.as_dtype(value.dtype).size * (tf.TensorShape(value.tensor_shape).num_elements() or 0)
            for value in values
        )

    def operations(self, length: int, *, one_memory: bool = False) -> list[Operation]:
        """The operations for a batch of `length` examples.

        Args:
          length: number of examples.
          one_memory: whether all CPU devices share one memory; else each has its own.
        """
        if not self._kinds:
            self._kinds = self._kinds_at(max(length, _FEW))
        read = GraphOperations(
            self._shaped(length),
            self._kinds,
            self._results,
            one_memory=one_memory,
            kernel_threads=self._kernel_threads,
            bodies=self._bodies,
        )
        return read.operations

    def _kinds_at(self, length: int) -> dict[str, str]:
        """The kinds of tensors, from two lengths of a batch. The graph of `length` is the last one."""
        more, few = self._shaped(2 * length), self._shaped(length)
        return kinds_of(
            few, more, [f"{ARGUMENT}{name}" for name, like in self._arguments.items() if is_open(like)]
        )

    def _shaped(self, length: int) -> tf.Graph:
        if self._last is None or self._last[0] != length:
            arguments = {name: (like, length) for name, like in self._arguments.items()}
            self._last = length, shaped(self._graph_def, arguments)
        return self._last[1]
