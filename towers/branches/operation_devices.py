"""The device of each operation of a traced tower.

    forward, in the model     noted while it was traced
    backward, and the loss    where the tensors are that it reads: on the only other device among theirs, or else
                              on the first
    of scalars and constants  where its result is read, if that is one device

Between devices a tensor passes an identity on each side, and so does its gradient (`towers.stages.crossings`). So
the operations of a branch's backward pass read the first device's tensors through identities of their own device
only: no gradient of a batch norm is computed on another device than its branch.
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from towers.branches.placed_run import FIRST
from towers.tracing.reading_order import in_reading_order


def operation_devices(
    graph: tf.Graph, marked: Sequence[int | None], sources: Mapping[str, int | None]
) -> dict[str, int]:
    """The index of the device of each operation, by its name. Arguments of the function have none.

    Args:
      graph: the traced function's.
      marked: [operations] as `towers.stages.marks.Marks.stages` returns it.
      sources: by the name of an argument's placeholder, the index of the argument's device; None where any device
        may read it.
    """
    operations = graph.get_operations()
    order = in_reading_order(operations)
    homes: dict[str, int | None] = {}
    for index in order:
        operation, mark = operations[index], marked[index]
        if operation.name in sources:
            homes[operation.name] = sources[operation.name]
        else:
            homes[operation.name] = _home_of_reads(operation, homes) if mark is None else mark
    found = {}
    for index in reversed(order):
        operation = operations[index]
        if operation.name in sources:
            continue
        if homes[operation.name] is None:
            homes[operation.name] = _home_of_readers(operation, homes)
        found[operation.name] = homes[operation.name]
    return found


def _home_of_reads(operation: tf.Operation, homes: Mapping[str, int | None]) -> int | None:
    reads = {homes[tensor.op.name] for tensor in operation.inputs if tensor.shape.rank != 0} - {None}
    if not reads:
        return None
    away = reads - {FIRST}
    return away.pop() if len(away) == 1 else FIRST


def _home_of_readers(operation: tf.Operation, homes: Mapping[str, int | None]) -> int:
    readers = {homes[reader.name] for tensor in operation.outputs for reader in tensor.consumers()}
    return readers.pop() if len(readers) == 1 else FIRST
