"""Sends optimizer state that is spread over the workers to the worker that writes checkpoints, and back.

    saving      part of its owner -> piece, piece, ... -> rank 0 -> file    each is freed before the next one comes
    restoring   file -> rank 0 -> piece, piece, ... -> part of its owner    what all have goes to all of them

All workers make the same calls in the same order. A piece passes all workers, and only its receivers keep it. Rank
0 reads the others' parts twice: the first time it drops them, so that a damaged file is detected before any worker
has a part of it.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from strategies.pieces import Piece
from strategies.ring.exchange.collectives import HostExchange
from strategies.ring.zero.remote_variable import RemoteVariable

# A slot of a part, and the rank that has its value.
SlotWithOwner = tuple[tf.Variable | RemoteVariable, int]


class SharedParts:
    """The parts of a ring's checkpoint: parts that every worker has, and parts that only one worker has."""

    def __init__(self, host: HostExchange, spread: Sequence[SlotWithOwner]):
        """Args:
        host: exchange between the workers.
        spread: the variables that only one worker has, in the same order on all workers.
        """
        self._host = host
        self._owners = {id(variable): owner for variable, owner in spread}

    def _owner(self, part: Piece) -> int | None:
        """The rank that has a part; None if all workers have it."""
        return self._owners.get(id(part.variable))

    def values(self, pieces: Sequence[Piece]) -> Iterator[tf.Tensor | np.ndarray | None]:
        """As `strategies.contract.Strategy.values`."""
        rank = self._host.rank
        for index, piece in enumerate(pieces):
            if owner := self._owner(piece):
                own = piece.value().numpy() if rank == owner else None
                value = self._sent(own, piece, index, root=owner)
            else:
                value = piece.value() if rank == 0 else None
            yield value if rank == 0 else None

    def restore(self, part: Piece, read: Callable[[Piece], tf.Tensor]) -> None:
        """On rank 0, as `strategies.contract.Strategy.restore`; the other workers get their parts from `share`."""
        if self._owner(part):
            for piece in part.divided():
                read(piece)
        else:
            part.variable.assign(read(part))

    def share(self, parts: Sequence[Piece], read: Callable[[Piece], tf.Tensor] | None) -> None:
        """Sends each part from rank 0 to the workers that have it: rank 0's own value, or the result of `read`."""
        num_sent = 0
        for part in parts:
            owner, rank = self._owner(part), self._host.rank
            if owner == 0:
                continue
            receives = rank != 0 and owner in (None, rank)
            received = np.empty(part.shape, part.dtype.as_numpy_dtype) if receives else None
            for piece in part.divided():
                own = None
                if rank == 0:
                    own = (piece.value() if owner is None else read(piece)).numpy()
                value = self._sent(own, piece, num_sent, root=0)
                num_sent += 1
                if receives:
                    received[piece.within] = value
            if receives:
                part.variable.assign(received)

    def _sent(self, own: np.ndarray | None, piece: Piece, index: int, *, root: int) -> np.ndarray:
        return self._host.sent(own, piece.shape, piece.dtype, root=root, purpose=f"piece {index}")


def bring(host: HostExchange, slots: Sequence[SlotWithOwner]) -> None:
    """Sends rank 0 the values of the others' slots. All workers call it with the same slots, in the same order."""
    others = [(variable, owner) for variable, owner in slots if owner != 0]
    host.broadcast([variable for variable, _ in others], roots=[owner for _, owner in others])


def release(slots: Sequence[SlotWithOwner]) -> None:
    """Frees the values of other workers' slots."""
    for variable, _ in slots:
        if isinstance(variable, RemoteVariable):
            variable.release()
