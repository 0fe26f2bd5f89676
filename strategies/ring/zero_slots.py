"""Optimizer state that is spread over the workers: to the worker that writes checkpoints, and back from it.

The values travel variable by variable, so that no other worker has more than one of them beside its own.
"""

from collections.abc import Sequence

import tensorflow as tf

from strategies.ring.collectives import HostExchange
from strategies.ring.remote_variable import RemoteVariable

# A slot of a part, and the rank that has its value.
SlotWithOwner = tuple[tf.Variable | RemoteVariable, int]


def bring(host: HostExchange, slots: Sequence[SlotWithOwner]) -> None:
    """Gives rank 0 the values of the others' slots. All workers call it, with the same slots in the same order."""
    others = of_others(slots)
    host.broadcast([variable for variable, _ in others], roots=[owner for _, owner in others])


def of_others(slots: Sequence[SlotWithOwner]) -> list[SlotWithOwner]:
    """The slots that rank 0 does not own."""
    return [(variable, owner) for variable, owner in slots if owner != 0]


def release(slots: Sequence[SlotWithOwner]) -> None:
    """Forgets the values of the others' slots."""
    for variable, _ in slots:
        if isinstance(variable, RemoteVariable):
            variable.release()
