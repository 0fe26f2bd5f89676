"""Frozen weights on ParameterServerStrategy's servers, and the copy that a worker keeps.

A worker pulls them in its first step, and again after the chief has set them; no step changes them.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from strategies.distribute import server_vectors
from strategies.distribute.host_functions import call

_CPU = "/device:CPU:0"


class FrozenWeight:
    """One weight, in pieces on the servers.

    Attributes:
      spec: its shape and dtype.
    """

    def __init__(self, vectors: server_vectors.ServerVectors, value: np.ndarray, name: str):
        """Args:
        vectors: makes the pieces.
        value: initial value.
        name: name of the variables.
        """
        self.spec = tf.TensorSpec(value.shape, value.dtype)
        self._pieces = vectors.new(np.ravel(value), name)

    def assign(self, value: np.ndarray) -> None:
        """Sets the weight, from the chief."""
        server_vectors.assign(self._pieces, np.ravel(value))

    def pulled(self, *, after: tf.Tensor) -> tf.Tensor:
        """The weight in a worker's graph, as `server_vectors.pulled`."""
        vector = server_vectors.pulled(self._pieces, self.spec.shape.num_elements(), after=after)
        return tf.reshape(vector, self.spec.shape)

    def variables(self) -> Sequence[tf.Variable]:
        """Its piece on each server."""
        return self._pieces


def kept_or_pulled(weights: Sequence[FrozenWeight], start: tf.Tensor, *, after: tf.Tensor) -> list[tf.Tensor]:
    """The weights in a worker's graph; the worker's process must offer `KeptWeights.functions`.

    Args:
      weights: the weights on the servers.
      start: int64 scalar, the number of the chief's start that set them.
      after: the servers read them after it.
    """
    if not weights:
        return []
    specs = [weight.spec for weight in weights]

    def kept():
        with tf.device(_CPU):
            return call("kept_frozen", [start], specs)

    def pulled():
        found = [weight.pulled(after=after) for weight in weights]
        with tf.device(_CPU):
            return call("keep_frozen", [start, *found], specs)

    with tf.device(_CPU):
        start = tf.identity(start)
        (has,) = call("has_frozen", [start], [tf.TensorSpec([], tf.bool)])
    return tf.cond(has, kept, pulled)


class KeptWeights:
    """A worker's copy. TensorFlow runs one step at a time on a worker."""

    def __init__(self):
        self._start, self._weights = None, ()

    def functions(self) -> dict[str, Callable]:
        """The host functions of a worker, by name."""
        return {"has_frozen": self._has, "keep_frozen": self._keep, "kept_frozen": lambda start: self._weights}

    def _has(self, start: np.ndarray) -> np.bool_:
        return np.bool_(int(start) == self._start)

    def _keep(self, start: np.ndarray, *weights: np.ndarray) -> Sequence[np.ndarray]:
        # Copies, because a host function's arguments may be TensorFlow's own memory.
        self._start, self._weights = int(start), [weight.copy() for weight in weights]
        return self._weights
