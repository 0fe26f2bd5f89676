"""Optimizer state on servers, read and written piece by piece by the chief's checkpoints."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from strategies.pieces import Piece, first_element, parts_of
from strategies.servers.carrier import Carrier


class SlotOnServers:
    """A slot of a parameter on the servers. This process has no copy of it.

    Attributes:
      shape, dtype: as of a variable.
    """

    def __init__(self, slot: str, name: str, like: tf.Variable, carrier: Callable[[], Carrier]):
        """Args:
        slot: name of the slot.
        name: canonical name of the parameter.
        like: the parameter.
        carrier: returns the connection to the servers.
        """
        self._slot, self._name, self._carrier = slot, name, carrier
        self.shape, self.dtype = like.shape, like.dtype

    def read(self, piece: Piece) -> np.ndarray:
        """The values of a piece; the workers must be paused."""
        begin = first_element(piece)
        end = begin + int(np.prod(piece.shape))
        return self._carrier().read(self._slot, self._name, begin, end).reshape(piece.shape)

    def write(self, piece: Piece, value) -> None:
        """Sets the values of a piece; no worker may have begun."""
        self._carrier().write(self._slot, self._name, first_element(piece), np.ravel(value))

    def numpy(self) -> np.ndarray:
        """The whole value; the workers must be paused."""
        return read_whole(self._carrier(), self._slot, self._name, self)

    def read_value(self) -> tf.Tensor:
        """As `numpy`."""
        return tf.constant(self.numpy())

    def assign(self, value) -> None:
        """Sets the whole value; no worker may have begun."""
        for piece in parts_of({self._name: self})[0].divided():
            self.write(piece, np.asarray(value, self.dtype.as_numpy_dtype)[piece.within])

    def __array__(self, *arguments, **named) -> np.ndarray:
        return np.asarray(self.numpy(), *arguments, **named)


def read_whole(carrier: Carrier, slot: str | None, name: str, like: tf.Variable | SlotOnServers) -> np.ndarray:
    """A whole parameter or slot, fetched piece by piece; `like` has its shape and dtype."""
    (part,) = parts_of({name: like})
    found = np.empty(part.shape, like.dtype.as_numpy_dtype)
    for piece in part.divided():
        begin = first_element(piece)
        values = carrier.read(slot, name, begin, begin + int(np.prod(piece.shape)))
        found[piece.within] = values.reshape(piece.shape)
    return found
