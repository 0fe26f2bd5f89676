"""Several training steps in one execution of a graph, for steps that are about as short as a call from Python.

    loop        while k < n:  next batch -> step -> row k of each number of the outcomes
    unrolled    next batch -> step 0,  next batch -> step 1, ...

One execution of a step takes 0.2 to 0.3 ms of Python and TensorFlow, whatever it computes, and reading a batch
and its outcome take as long again. Milliseconds a step, one at a time, in a loop, and by others (a dense network
of 1,474 parameters, AdamW, AMD EPYC, Zen 5, two cores; Keras with 1 and 32 steps per execution):

    examples, towers    one at a time    in a loop    Keras `fit`     PyTorch
    64, 1               0.50 to 0.55     0.27         0.61, 0.24      0.21
    64, 2               0.48 to 0.64     0.26
    256, 2              0.54 to 0.63     0.28

A graph that repeats four or eight steps takes 0.19 to 0.37 ms a step there, and twice as long to trace. GPUs get
it all the same: TensorFlow has what a loop passes on sent to the host and back in each round.
"""

import abc
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers.devices import HOST
from towers.mean_and_update import StepOutcome

# The scope of the operation that reads a batch, and its name in an error: '[[while/next_batch/IteratorGetNext]]'.
# Transfers of what it read, which the error of a step may name, are '[[while/next_batch/IteratorGetNext/_42]]'.
_READING = "next_batch"
_READING_FAILED = re.compile(rf"{_READING}(_\d+)?/\w+[\]}}]")


class StepsInOneExecution(abc.ABC):
    """Runs a step again and again, each time on the next batch.

    Attributes:
      begun: index of the step of an execution that was begun last, from the reading of its batch on.
      takes_any_number: whether an execution can have any number of steps; otherwise each number is traced anew.
    """

    takes_any_number: bool

    def __init__(
        self,
        step: Callable[[Any, tf.Tensor], StepOutcome],
        *,
        batch_of: Callable[[Any], Any],
        rate_device: str,
        like: StepOutcome,
    ):
        """Args:
        step: function of a batch and a learning rate, to be traced.
        batch_of: function from an element of the iterator to a batch for `step`.
        rate_device: the device of the learning rates.
        like: an outcome of `step`.
        """
        self._step, self._batch_of, self._rate_device, self._like = step, batch_of, rate_device, like
        with tf.device(HOST):
            self.begun = tf.Variable(0, trainable=False)
        self._traced: dict[int | None, Callable] = {}

    @abc.abstractmethod
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

    def _outcome(self, numbers: Sequence[tf.Tensor]) -> StepOutcome:
        return tf.nest.pack_sequence_as(self._like, numbers)

    def _graph(self, function: Callable, elements: Any, count: int | None):
        """The graph of a function of an iterator and so many rates; a resumed run's iterator may follow."""
        if count not in self._traced:
            specs = tf.type_spec_from_value(elements), tf.TensorSpec([count], tf.float32)
            self._traced[count] = tf.function(function, autograph=False).get_concrete_function(*specs)
        return self._traced[count]

    def _next_batch(
        self, elements: Any, index: int | tf.Tensor, after: Sequence[tf.Tensor] = ()
    ) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """The batch of the step with this index, read when `after` is there, and the times before and after it."""
        with tf.device(HOST):
            with tf.control_dependencies(after):
                asked, begun = tf.timestamp(), self.begun.assign(index, read_value=False)
            with tf.control_dependencies([asked, begun]), tf.name_scope(_READING):
                element = elements.get_next()
            with tf.control_dependencies(tf.nest.flatten(element, expand_composites=True)):
                return self._batch_of(element), asked, tf.timestamp()


class LoopOfSteps(StepsInOneExecution):
    """For steps whose outcomes are in the host's memory."""

    takes_any_number = True

    def __call__(self, elements, rates):
        loop = self._graph(self._repeated, elements, None)
        rows, waited_seconds = loop(elements, rates)
        with tf.device(HOST):  # TensorFlow would unstack them on a GPU
            by_number = [tf.unstack(row) for row in rows]
        return list(map(self._outcome, zip(*by_number, strict=True))), float(waited_seconds)

    def _repeated(self, elements, rates):
        numbers = tf.nest.flatten(self._like)
        with tf.device(HOST):
            count, first, waited_seconds = tf.shape(rates)[0], tf.constant(0), tf.constant(0.0, tf.float64)
            rows = [tf.TensorArray(number.dtype, count) for number in numbers]

        def still(index, *_):
            with tf.device(HOST):
                return index < count

        def body(index, waited_seconds, *rows):
            batch, asked, came = self._next_batch(elements, index)
            with tf.device(HOST):
                rate = rates[index]
            outcome = tf.nest.flatten(self._step(batch, rate))
            with tf.device(HOST):
                rows = [row.write(index, number) for row, number in zip(rows, outcome, strict=True)]
                return index + 1, waited_seconds + (came - asked), *rows

        # A step reads variables that the step before it has assigned.
        _, waited_seconds, *rows = tf.while_loop(
            still, body, (first, waited_seconds, *rows), parallel_iterations=1
        )
        with tf.device(HOST):
            return [row.stack() for row in rows], waited_seconds


class UnrolledSteps(StepsInOneExecution):
    """For steps whose outcomes stay on GPUs."""

    takes_any_number = False

    def __call__(self, elements, rates):
        steps = self._graph(self._one_after_another, elements, len(rates))
        outcomes, waited_seconds = steps(elements, rates)
        return list(map(self._outcome, outcomes)), float(waited_seconds)

    def _one_after_another(self, elements, rates):
        with tf.device(self._rate_device):
            each = tf.unstack(rates)
        outcomes, waited_seconds, came = [], [], []
        for index, rate in enumerate(each):
            # The host takes batches as they come, ahead of the GPU, which finds no fault in them.
            batch, asked, *came = self._next_batch(elements, index, came)
            with tf.device(HOST):
                waited_seconds.append(came[0] - asked)
            outcomes.append(tf.nest.flatten(self._step(batch, rate)))
        with tf.device(HOST):
            return outcomes, tf.add_n(waited_seconds)


def is_of_reading(error: tf.errors.OpError) -> bool:
    """Whether the error of an execution is that of reading a batch."""
    return _READING_FAILED.search(str(error)) is not None
