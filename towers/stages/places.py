"""The place of each operation of a traced tower: its stage, and the forward or backward pass.

The operations of the forward pass are known, because they were recorded during tracing. The place of the others
follows from what they read:

    before the stages          stage 0
    after them (the loss)      the latest stage among those that it reads; the last one if it reads the batch alone
    in the backward pass       the earliest stage among those that it reads

So regularisers, masks, skips, metrics and any loss are computed as in a tower of one device, nothing is computed
twice, and the tensors that cross from a forward to a backward pass are those that are kept. A parameter that
several stages read has a reading, and a gradient, for each of them.

In the forward pass a stage reads what earlier stages computed, in the backward pass what later stages computed;
every schedule keeps this order.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from towers.pipeline.action import Kind
from towers.stages.marks import Marks
from towers.tracing.reading_order import in_reading_order


class Place(NamedTuple):
    """A part of the graph.

    Attributes:
      stage: index of the stage.
      kind: the pass; None for operations that read only parameters, which all microbatches share.
    """

    stage: int
    kind: Kind | None


@dataclasses.dataclass(frozen=True)
class Source:
    """An argument of the traced function.

    Attributes:
      stage: the stage that reads it; None if any stage may.
      varies: whether microbatches get different values of it.
      is_small: whether it is a seed or a scalar: results computed only from such arguments are recomputed, not
        sent.
    """

    stage: int | None = None
    varies: bool = True
    is_small: bool = False


class _Reads(NamedTuple):
    """What an operation depends on: stages, whether it varies, and whether on more than small sources."""

    stage: int | None
    varies: bool
    is_large: bool


def places_of(graph: tf.Graph, marks: Marks, sources: Mapping[str, Source], num_stages: int) -> dict[str, Place]:
    """The places of the operations by name. Operations that each piece copies, such as constants, have none.

    Args:
      graph: the traced function's.
      marks: recorded while it was traced.
      sources: its arguments by the names of their placeholders.
      num_stages: number of stages.
    """
    last = num_stages - 1
    marked = marks.stages()
    reads: dict[str, _Reads] = {}
    places: dict[str, Place] = {}
    operations = graph.get_operations()[: marks.end]
    of_forward = _added_to_forward(operations, marks.backward)
    for index in in_reading_order(operations):
        operation = operations[index]
        name = operation.name
        if name in sources:
            source = sources[name]
            reads[name] = _Reads(source.stage, source.varies, not source.is_small)
            continue
        deps = [reads[tensor.op.name] for tensor in operation.inputs]
        varies, is_large = any(dep.varies for dep in deps), any(dep.is_large for dep in deps)
        stages = [dep.stage for dep in deps if dep.stage is not None]
        own = marked[index]
        is_copied = not is_large and (own is None or not varies) and not operation.op_def.is_stateful
        if is_copied:
            reads[name] = _Reads(None, varies, False)
            continue
        is_added = name in of_forward
        is_backward = marks.backward is not None and index >= marks.backward and not is_added
        if own is not None:
            stage = own
        elif is_backward:
            stage = min(stages, default=last)
        else:
            stage = max(stages, default=last if index >= marks.last and not is_added else 0)
        varies = varies or is_backward
        kind = None if not varies else Kind.BACKWARD if is_backward else Kind.FORWARD
        places[name] = Place(stage, kind)
        reads[name] = _Reads(stage, varies, True)
    return places


def _added_to_forward(operations: Sequence[tf.Operation], backward: int | None) -> set[str]:
    """Names of operations that the backward pass created and the forward pass reads: lists of a loop.

    Args:
      operations: operations in the order of tracing.
      backward: index of the first operation of the backward pass; None without one.
    """
    if backward is None:
        return set()
    made = {operation.name: operation for operation in operations[backward:]}
    found: set[str] = set()
    readers = list(operations[:backward])
    while readers:
        read = [made[t.op.name] for t in readers.pop().inputs if t.op.name in made and t.op.name not in found]
        found.update(operation.name for operation in read)
        readers += read
    return found


def with_late_weights(graph: tf.Graph, places: Mapping[str, Place]) -> dict[str, Place]:
    """The places, with operations that no other stage waits for in WEIGHTS, the second half of a backward pass.

    Args:
      graph: the traced function's.
      places: as `places_of` returns them.
    """
    found = dict(places)
    for operation in reversed(graph.get_operations()):
        place = found.get(operation.name)
        if place is None or place.kind is not Kind.BACKWARD:
            continue
        readers = [found.get(reader.name) for tensor in operation.outputs for reader in tensor.consumers()]
        late = Place(place.stage, Kind.WEIGHTS)
        if all(reader is None or reader == late for reader in readers):
            found[operation.name] = late
    return found
