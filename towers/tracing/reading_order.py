"""Sorts the operations of a graph so that each comes after those that it reads."""

from collections.abc import Sequence

import tensorflow as tf


def in_reading_order(operations: Sequence[tf.Operation]) -> list[int]:
    """The positions of operations, each after those of the operations whose tensors it reads.

    This is the order of creation, except for loops: the gradient of a loop creates lists that the loop reads.

    Args:
      operations: operations of one graph, in the order of creation. Others that they read are left out.
    """
    positions = {operation.name: position for position, operation in enumerate(operations)}
    found: list[int] = []
    done: set[int] = set()
    for last in range(len(operations)):
        waiting = [last]
        while waiting:
            position = waiting[-1]
            sources = [positions.get(tensor.op.name, position) for tensor in operations[position].inputs]
            missing = [source for source in sources if source not in done and source != position]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if position not in done:
                done.add(position)
                found.append(position)
    return found
