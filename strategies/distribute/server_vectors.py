"""Vectors that are divided over ParameterServerStrategy's servers, one piece on each.

Parameters, slots and state are a few long vectors instead of many variables: all servers hold equal numbers of
bytes, and a worker pulls and pushes one tensor for each server. Each transferred tensor is a remote call of about
0.1 ms on both sides.
"""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf


class ServerVectors:
    """Creates such vectors. The strategy's partitioner must be `partitioner(num_servers)`."""

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy, num_servers: int):
        self._strategy, self._num_servers = strategy, num_servers

    def new(self, values: np.ndarray, name: str) -> list[tf.Variable]:
        """A vector's pieces, by server. It is padded with zeros to pieces of equal length."""
        length = self._num_servers * max(1, -(-len(values) // self._num_servers))
        padded = np.zeros(length, values.dtype)
        padded[: len(values)] = values
        with self._strategy.scope():
            whole = tf.Variable(padded, name=name, trainable=False)
        # With one server, TensorFlow creates a plain variable.
        return list(getattr(whole, "variables", [whole]))


def partitioner(num_servers: int):
    """A partitioner that splits every vector evenly over the servers."""
    return tf.distribute.experimental.partitioners.FixedShardsPartitioner(num_servers)


def assign(pieces: list[tf.Variable], values: np.ndarray) -> None:
    """Assigns a vector, from the chief."""
    size = pieces[0].shape[0]
    padded = np.zeros(size * len(pieces), values.dtype)
    padded[: len(values)] = values
    for index, piece in enumerate(pieces):
        piece.assign(padded[index * size : (index + 1) * size])


def read_part(pieces: list[tf.Variable], begin: int, end: int) -> np.ndarray:
    """Elements of the vector, at the chief."""
    found = [np.zeros(0, pieces[0].dtype.as_numpy_dtype)]
    for piece, low, high in _inside(pieces, begin, end):
        # Sliced on the server, so that only the part is sent.
        with tf.device(piece.device):
            part = piece.read_value()[low:high]
        found.append(part.numpy())
    return np.concatenate(found)


def write_part(pieces: list[tf.Variable], begin: int, values: np.ndarray) -> None:
    """Assigns elements of the vector, from the chief.

    Each server copies its piece once for each part: after an assignment to a slice TensorFlow would copy the
    variable at every read, and so at every pull.
    """
    for piece, low, high in _inside(pieces, begin, begin + len(values)):
        with tf.device(piece.device):
            whole = piece.read_value()
            piece.assign(tf.concat([whole[:low], values[: high - low], whole[high:]], 0))
        values = values[high - low :]


def _inside(pieces: list[tf.Variable], begin: int, end: int) -> Iterator[tuple[tf.Variable, int, int]]:
    """Yields the pieces that contain these elements, with the first and the end index in each."""
    size = pieces[0].shape[0]
    for index, piece in enumerate(pieces):
        low, high = max(begin - index * size, 0), min(end - index * size, size)
        if low < high:
            yield piece, low, high


def pulled(pieces: list[tf.Variable], length: int, *, after: tf.Tensor) -> tf.Tensor:
    """The vector in a worker's graph: each server sends its piece, unless there is nothing to send.

    Args:
      pieces: by server.
      length: length of the vector.
      after: the servers read their pieces after it.
    """
    if not length:
        return tf.zeros([0], pieces[0].dtype)
    parts = []
    for piece in pieces:
        # Only on the server: each operation of the worker that waits for `after` would cost one more message.
        with tf.device(piece.device), tf.control_dependencies([after]):
            # A copy, because an update may change the variable before the value is sent.
            parts.append(piece.read_value())
    return tf.concat(parts, 0)[:length] if len(parts) > 1 else parts[0][:length]


def cut(vector: tf.Tensor, pieces: list[tf.Variable]) -> list[tf.Tensor]:
    """A worker's vector in one part for each piece."""
    size = pieces[0].shape[0]
    missing = size * len(pieces) - vector.shape[0]
    padded = tf.pad(vector, [[0, missing]]) if missing else vector
    return tf.split(padded, len(pieces)) if len(pieces) > 1 else [padded]
