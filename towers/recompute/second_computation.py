"""Lets the backward pass of a traced graph read copies of forward operations instead of the first results.

    forward     x --> A --> B --> C --> loss                A's and B's results are freed as soon as C has run
                |
    backward    +--> A' -> B' ----> gradients of C, B, A    A' waits for the gradient of C's result

The numbers are the same: what a copy computes depends on the same tensors. An operation with an effect (an
exchange between towers, a random number without a seed) is not copied: copies read its first result. Small
results, such as shapes and statistics, are kept too. So is a result that a gradient compares with another one: the
gradient of a maximum tests where its input equals the maximum. Kernels that fuse other operations, or get other
addresses, round the second computation differently, and then nothing would be equal: a gradient of 0 / 0.
(`tf.recompute_grad` would call a layer again outside of Keras's scope: with other seeds, and with a second update
of its state.)

A graph optimizer would merge the copies with the first operations (common subexpressions). To prevent this, the
copies wait, by control inputs, for the gradient with which the segment's backward pass begins. XLA ignores control
inputs, and its own barriers saved nothing, so XLA and recomputation exclude each other.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from towers.recompute.ranges import Range
from towers.timeline.activities import RECOMPUTED_SUFFIX as _SUFFIX

# Number of elements of the largest result that is kept, not computed again.
_SMALL = 4096
_NEVER_COPIED = ("Const", "Placeholder", "NoOp")


@dataclasses.dataclass(frozen=True)
class RecomputedRange:
    """A range, and the gradients that its copies wait for.

    Attributes:
      of: the range.
      gradients: the existing gradients of the range's outputs.
    """

    of: Range
    gradients: tuple[tf.Tensor, ...]


def compute_again(
    graph: tf.Graph,
    graph_def: tf.compat.v1.GraphDef,
    ranges: Sequence[RecomputedRange],
    *,
    backward_begin: int,
    results: Sequence[tf.Tensor],
) -> dict[str, str]:
    """Adds the copies to `graph_def`. Returns, for each copy's name, the name of the original operation.

    Args:
      graph: the traced graph.
      graph_def: its description; it is changed in place.
      ranges: the segments in the order of the forward pass, none overlapping another.
      backward_begin: index of the first operation of the backward pass, in the order of creation.
      results: gradients that the backward pass returns.
    """
    operations = graph.get_operations()
    index = {operation.name: number for number, operation in enumerate(operations)}
    nodes = {node.name: node for node in graph_def.node}
    returned = {tensor.name for tensor in getattr(graph, "outputs", ())}
    parts = [_Part(operations, index, found, backward_begin, returned) for found in ranges]
    waits = _waits(parts, [result.op for result in results])
    for part, waited in zip(parts, waits, strict=True):
        part.add_to(graph_def, nodes, waited)
    return {one.name + _SUFFIX: one.name for part in parts for one in part.copied}


def _waits(parts: Sequence["_Part"], results: Sequence[tf.Operation]) -> list[set[tf.Operation]]:
    """For each part the results of later parts' backward passes that its copies wait for too.

    Otherwise the backward pass would run ahead along the gradients of activations, and recompute the activations
    of many parts before the gradients of their parameters used them: 377 MiB instead of 196. No part waits for
    what depends on its own copies or on those of an earlier part, so there is no cycle.
    """
    found: list[set[tf.Operation]] = []
    behind: set[tf.Operation] = set()
    for part in parts:
        behind |= _closure(part.begins_backward, _readers_of)
        found.append(set(results) - behind)
    # The copies of a later part have already waited for the rest.
    return [own - later for own, later in zip(found, [*found[1:], set()], strict=True)]


class _Part:
    """The copies of one segment's operations that its backward pass needs."""

    def __init__(self, operations, index, found: RecomputedRange, backward_begin: int, returned):
        self._index, self._range, self._returned = index, found.of, returned
        self._backward_begin = backward_begin
        self._triggers = found.gradients
        self._kept: dict[str, bool] = {}
        before = _closure((gradient.op for gradient in found.gradients), _inputs_of)
        self._readers = [
            (operation, position)
            for operation in operations[backward_begin:]
            if found.gradients and operation not in before
            for position, tensor in enumerate(operation.inputs)
            if not self._is_kept(tensor)
        ]
        wanted = [operation.inputs[position].op for operation, position in self._readers]
        self.copied = _closure(wanted, self._computed_inputs)
        self.begins_backward = [*(gradient.op for gradient in self._triggers), *(one for one, _ in self._readers)]

    def _contains(self, operation: tf.Operation) -> bool:
        return self._range.begin <= self._index[operation.name] < self._range.end

    def _is_kept(self, tensor: tf.Tensor) -> bool:
        """Whether copies read the first result: one of another part, of an effect, or one that is kept anyway."""
        if tensor.name not in self._kept:
            self._kept[tensor.name] = self._stays(tensor)
        return self._kept[tensor.name]

    def _stays(self, tensor: tf.Tensor) -> bool:
        if not self._contains(tensor.op) or tensor.op.type in _NEVER_COPIED or tensor.op._is_stateful:
            return True
        if tensor.name in self._returned or _is_small(tensor):
            return True
        return any(self._needs_first(reader) for reader in tensor.consumers())

    def _needs_first(self, reader: tf.Operation) -> bool:
        """Whether it reads the first result anyway, or compares it with one that may be a first result."""
        if self._index[reader.name] < self._backward_begin:
            return not self._contains(reader)
        return reader.type == "Equal"

    def _computed_inputs(self, operation: tf.Operation) -> list[tf.Operation]:
        return [tensor.op for tensor in operation.inputs if not self._is_kept(tensor)]

    def add_to(self, graph_def, nodes, results: Iterable[tf.Operation]) -> None:
        waits = [f"^{one.name}" for one in (*(gradient.op for gradient in self._triggers), *results)]
        for operation in sorted(self.copied, key=lambda one: self._index[one.name]):
            copy = graph_def.node.add()
            copy.CopyFrom(nodes[operation.name])
            copy.name += _SUFFIX
            inputs = [self._input(tensor) for tensor in operation.inputs]
            controls = [
                f"^{one.name}{_SUFFIX}" if one in self.copied else f"^{one.name}"
                for one in operation.control_inputs
            ]
            is_first = not any(self._is_copied(tensor) for tensor in operation.inputs)
            copy.input[:] = inputs + list(dict.fromkeys(controls + waits * is_first))
        for operation, position in self._readers:
            tensor = operation.inputs[position]
            nodes[operation.name].input[position] = _input_name(tensor, tensor.op.name + _SUFFIX)

    def _is_copied(self, tensor: tf.Tensor) -> bool:
        return tensor.op in self.copied and not self._is_kept(tensor)

    def _input(self, tensor: tf.Tensor) -> str:
        return _input_name(tensor, tensor.op.name + _SUFFIX if self._is_copied(tensor) else tensor.op.name)


def _is_small(tensor: tf.Tensor) -> bool:
    # A list of tensors, in which loops keep their activations, has the shape of a scalar.
    return tensor.dtype != tf.variant and (tensor.shape.num_elements() or _SMALL + 1) <= _SMALL


def _closure(
    operations: Iterable[tf.Operation], neighbours: Callable[[tf.Operation], Iterable[tf.Operation]]
) -> set[tf.Operation]:
    """The operations, and all that are reached from them."""
    waiting, found = list(operations), set()
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting.extend(neighbours(operation))
    return found


def _inputs_of(operation: tf.Operation) -> list[tf.Operation]:
    return [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)


def _readers_of(operation: tf.Operation) -> list[tf.Operation]:
    readers = [reader for tensor in operation.outputs for reader in tensor.consumers()]
    return readers + list(operation._control_outputs)


def _input_name(tensor: tf.Tensor, operation: str) -> str:
    return f"{operation}:{tensor.value_index}" if tensor.value_index else operation
