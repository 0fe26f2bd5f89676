"""Several training steps in one execution of a graph, for steps that are about as short as a call from Python.

    step k:   next batch  ->  step  ->  row k of each number of the outcomes          a loop in the graph

One execution of a step takes 0.2 to 0.3 ms of Python and TensorFlow, whatever it computes, and reading a batch
and its outcome take as long again. Milliseconds a step, one at a time, in a loop, and by others (a dense network
of 1,474 parameters, AdamW, AMD EPYC, Zen 5, two cores; Keras with 1 and 32 steps per execution):

    examples, towers    one at a time    in a loop    Keras `fit`     PyTorch
    64, 1               0.50 to 0.55     0.27         0.61, 0.24      0.21
    64, 2               0.48 to 0.64     0.26
    256, 2              0.54 to 0.63     0.28

A graph that repeats four or eight steps takes 0.19 to 0.37 ms a step there, and twice as long to trace.
"""

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towers.devices import HOST
from towers.mean_and_update import StepOutcome

# The scope of the operation that reads a batch, and its name in an error: '[[while/next_batch/IteratorGetNext]]'.
# Transfers of what it read, which the error of a step may name, are '[[while/next_batch/IteratorGetNext/_42]]'.
_READING = "next_batch"
_READING_FAILED = re.compile(rf"{_READING}/\w+[\]}}]")


class StepsInOneExecution:
    """Runs a step again and again, each time on the next batch.

    Attributes:
      begun: index of the step of an execution that was begun last, from the reading of its batch on.
    """

    def __init__(
        self,
        step: Callable[[Any, tf.Tensor], StepOutcome],
        *,
        elements: Any,
        batch_of: Callable[[Any], Any],
        rate_device: str,
        like: StepOutcome,
    ):
        """Args:
        step: function of a batch and a learning rate, which was called before.
        elements: an iterator like that of later calls.
        batch_of: function from an element of the iterator to a batch for `step`.
        rate_device: the device of the learning rates.
        like: an outcome of `step`.
        """
        self._step, self._batch_of, self._rate_device, self._like = step, batch_of, rate_device, like
        # Where their memory is: TensorFlow would put the rows of a GPU machine's host on its first GPU.
        self._devices = [number.backing_device for number in tf.nest.flatten(like)]
        with tf.device(HOST):
            self.begun = tf.Variable(0, trainable=False)
        # Traced here, for any number of steps, and not anew for the iterator of a resumed run.
        self._loop = tf.function(self._repeated, autograph=False).get_concrete_function(
            tf.type_spec_from_value(elements), tf.TensorSpec([None], tf.float32)
        )

    def __call__(self, elements: Any, rates: tf.Tensor) -> tuple[list[StepOutcome], float]:
        """As many steps as there are learning rates.

        Args:
          elements: TensorFlow's iterator, from which each step takes one element.
          rates: float32 [steps], on the device of `rate_device`.

        Returns:
          The outcomes of the steps, whose numbers may still be under computation on their devices, and the seconds
          that the steps waited for their batches.

        Raises:
          tf.errors.OpError: the step `begun` failed, or there was no element left for it. The steps before it are
            applied, and their outcomes are lost.
        """
        rows, waited_seconds = self._loop(elements, rates)
        by_number = []
        for device, row in zip(self._devices, rows, strict=True):
            with tf.device(device):
                by_number.append(tf.unstack(row))
        outcomes = [tf.nest.pack_sequence_as(self._like, numbers) for numbers in zip(*by_number, strict=True)]
        return outcomes, float(waited_seconds)

    def _repeated(self, elements, rates):
        numbers = tf.nest.flatten(self._like)
        with tf.device(HOST):
            count, first, waited_seconds = tf.shape(rates)[0], tf.constant(0), tf.constant(0.0, tf.float64)
        rows = []
        for device, number in zip(self._devices, numbers, strict=True):
            with tf.device(device):
                rows.append(tf.TensorArray(number.dtype, count, element_shape=number.shape))

        def still(index, *_):
            with tf.device(HOST):
                return index < count

        def body(index, waited_seconds, *rows):
            batch, seconds = self._next_batch(elements, index)
            with tf.device(self._rate_device):
                rate = rates[index]
            outcome = self._step(batch, rate)
            written = []
            for device, row, number in zip(self._devices, rows, tf.nest.flatten(outcome), strict=True):
                with tf.device(device):
                    written.append(row.write(index, number))
            with tf.device(HOST):
                return index + 1, waited_seconds + seconds, *written

        # A step reads variables that the step before it has assigned.
        _, waited_seconds, *rows = tf.while_loop(
            still, body, (first, waited_seconds, *rows), parallel_iterations=1
        )
        stacked = []
        for device, row in zip(self._devices, rows, strict=True):
            with tf.device(device):
                stacked.append(row.stack())
        return stacked, waited_seconds

    def _next_batch(self, elements, index: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """The next batch, and the seconds of waiting for it."""
        with tf.device(HOST):
            asked, begun = tf.timestamp(), self.begun.assign(index, read_value=False)
            with tf.control_dependencies([asked, begun]), tf.name_scope(_READING):
                element = elements.get_next()
            with tf.control_dependencies(tf.nest.flatten(element, expand_composites=True)):
                return self._batch_of(element), tf.timestamp() - asked


def is_of_reading(error: tf.errors.OpError) -> bool:
    """Whether the error of an execution is that of reading a batch."""
    return _READING_FAILED.search(str(error)) is not None
