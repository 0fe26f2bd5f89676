"""Compiles functions on the towers' devices while the step is traced, which takes one core.

XLA compiles a function for each device, at its first call: for ResNet-20 on two cores 8 loops of 0.5 to 1 s each.

Tried, and not worth it: TensorFlow's cache of compiled code in files (tf_xla_persistent_cache_directory). A second
run of ResNet-20 needs 14 s of CPU time for its first two steps instead of 21 to 24 (AMD EPYC, Zen 3). But a
damaged file ends the run, reading each file logs an error line, and files for different CPU instructions would
have to be kept apart.
"""

import contextlib
import threading
from collections.abc import Iterable, Mapping

import tensorflow as tf

from towers.layers.convolutions.winograd_loops import CompiledCall


def compile_ahead(calls: Mapping[str, Iterable[CompiledCall]]) -> threading.Thread:
    """Calls functions with zero images in the background, so that XLA compiles them; the step waits for that.

    Args:
      calls: for each device, its calls, one after another.

    Returns:
      The thread. It ends by itself; at exit Python waits for it.
    """

    # Called within a graph, because calls from Python share no compiled code. With an argument, because TensorFlow
    # would fold constants beforehand, without XLA.
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([])])
    def call_all(number):
        return [_chain(device, of_device, number) for device, of_device in calls.items()]

    concrete = call_all.get_concrete_function()
    thread = threading.Thread(target=_run, args=(concrete,), name="compile_ahead")
    thread.start()
    return thread


def _chain(device: str, calls: Iterable[CompiledCall], number: tf.Tensor) -> tf.Tensor:
    """A number that depends on the results of all calls."""
    with tf.device(device):
        for call in calls:
            count = tf.cast(number, tf.int32)
            result = call.function(*(tf.fill(shape, number) for shape in call.shapes), count)
            # The next call depends on this number, so that only one result is in memory at a time.
            number = tf.reshape(result, [-1])[0]
        return number


def _run(concrete) -> None:
    # The step's own call fails too, and its error names the layer.
    with contextlib.suppress(tf.errors.OpError):
        concrete(tf.zeros([]))
