"""How long a worker's own towers compute in a step, without waiting for the other workers."""

import time

import tensorflow as tf

from towers import gradients
from towers.devices import HOST


class BusyTime:
    """A clock that starts on the host and stops inside a step's graph."""

    def __init__(self):
        with tf.device(HOST):
            self._since = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self._busy = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def start(self) -> None:
        """Call it when a step begins."""
        self._since.assign(time.monotonic())

    def stop(self, own: list[gradients.Gradient]) -> None:
        """Call it in the step's graph with the gradients of this worker's towers, before they are exchanged.

        In a step of several microbatches, call it for each: the last call counts.
        """
        with tf.device(HOST):
            stopped = _time_of(own[0])
            self._busy.assign_add(stopped - self._since.read_value())
            self._since.assign(stopped)

    def take_seconds(self) -> float:
        """Seconds between `start` and `stop`, summed since the last call."""
        seconds = float(self._busy)
        self._busy.assign(0.0)
        return seconds


def _time_of(gradient: gradients.Gradient) -> tf.Tensor:
    """Time at which this gradient was computed. A backward pass computes the first parameter's gradient last."""
    some = tf.reshape(gradients.values_of(gradient), [-1])[:1]
    # Not tf.timestamp, which is stateful: TensorFlow would run it after all earlier collectives.
    return tf.numpy_function(lambda _: time.monotonic(), [some], tf.float64, stateful=False)
