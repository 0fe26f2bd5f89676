"""Several training steps in one execution of a graph, for steps that are about as short as a call from Python.

    loop        while k < n:  next batch -> step -> row k of each number of the outcomes     on CPUs
    unrolled    n batches read before -> step 0, step 1, ...                                 on GPUs

One execution of a step takes 0.2 to 0.3 ms of Python and TensorFlow, whatever it computes, and reading a batch
and its outcome take as long again. Milliseconds a step, one at a time, in a loop, and by others (a dense network
of 1,474 parameters, AdamW, AMD EPYC, Zen 5, two cores; Keras with 1 and 32 steps per execution):

    examples, towers    one at a time    in a loop    Keras `fit`     PyTorch
    64, 1               0.50 to 0.55     0.27         0.61, 0.24      0.21
    64, 2               0.48 to 0.64     0.26
    256, 2              0.54 to 0.63     0.28

Four or eight steps unrolled take 0.19 to 0.37 ms a step there, and twice as long to trace. GPUs run unrolled steps
nevertheless: in a loop TensorFlow would send the loop variables to the host and back in each iteration. Nor does
the graph read batches on GPUs: anything that comes from the host, even a mere signal, waits for all work queued on
the GPU.

With long steps nothing is gained: those of ResNet-20 (batch 256) take 318 ms in one execution, 314 in one for each
step (Intel Xeon with AMX).
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers.devices import HOST
from towers.mean_and_update import StepOutcome

# Takes a batch and a learning rate; it is traced.
Step = Callable[[Any, tf.Tensor], StepOutcome]

_RATE = tf.TensorSpec([], tf.float32)
# The name scope of the operation that reads a batch. An error names that operation
# '[[while/next_batch/IteratorGetNext]]'; the error of a step may name a transfer of the batch,
# '[[while/next_batch/IteratorGetNext/_42]]'.
_READING = "next_batch"
_READING_FAILED = re.compile(rf"{_READING}/\w+[\]}}]")


class LoopOfSteps:
    """Reads batches from an iterator and computes steps, whose outcomes are in the host's memory.

    Attributes:
      begun: index, within an execution, of the step that started last; a step starts by reading its batch.
    """

    def __init__(self, step: Step, *, elements: tf.data.Iterator, like: StepOutcome):
        """Args:
        step: a step.
        elements: an iterator like that of later calls.
        like: an outcome of `step`.
        """
        self._step, self._like = step, like
        with tf.device(HOST):
            self.begun = tf.Variable(0, trainable=False)
        # Traced here once, for any number of steps and for the iterator of a resumed run too.
        self._loop = tf.function(self._repeated, autograph=False).get_concrete_function(
            tf.type_spec_from_value(elements), tf.TensorSpec([None], tf.float32)
        )

    def __call__(self, elements: tf.data.Iterator, rates: Sequence[float]) -> tuple[list[StepOutcome], float]:
        """Computes one step for each learning rate.

        Args:
          elements: each step takes one element, a batch.
          rates: the learning rates.

        Returns:
          The outcomes of the steps, and the seconds that the steps waited for their batches.

        Raises:
          tf.errors.OpError: the step `begun` failed, or there was no element left for it. The steps before it are
            applied, and their outcomes are lost.
        """
        with tf.device(HOST):  # a GPU is the default
            rows, waited_seconds = self._loop(elements, tf.constant(rates, tf.float32))
            by_number = [tf.unstack(row) for row in rows]
        steps = zip(*by_number, strict=True)
        return [tf.nest.pack_sequence_as(self._like, numbers) for numbers in steps], float(waited_seconds)

    def _repeated(self, elements, rates):
        with tf.device(HOST):
            count, first, waited_seconds = tf.shape(rates)[0], tf.constant(0), tf.constant(0.0, tf.float64)
            rows = [tf.TensorArray(number.dtype, count) for number in tf.nest.flatten(self._like)]

        def still(index, *_):
            with tf.device(HOST):
                return index < count

        def body(index, waited_seconds, *rows):
            batch, seconds = self._next_batch(elements, index)
            with tf.device(HOST):
                rate = rates[index]
            numbers = tf.nest.flatten(self._step(batch, rate))
            with tf.device(HOST):
                rows = [row.write(index, number) for row, number in zip(rows, numbers, strict=True)]
                return index + 1, waited_seconds + seconds, *rows

        # One iteration at a time: a step reads variables that the step before it assigns.
        _, waited_seconds, *rows = tf.while_loop(
            still, body, (first, waited_seconds, *rows), parallel_iterations=1
        )
        with tf.device(HOST):
            return [row.stack() for row in rows], waited_seconds

    def _next_batch(self, elements, index: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """The next batch, and a float64 scalar: the seconds that the step waited for it."""
        with tf.device(HOST):
            asked, begun = tf.timestamp(), self.begun.assign(index, read_value=False)
            with tf.control_dependencies([asked, begun]), tf.name_scope(_READING):
                batch = elements.get_next()
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                return batch, tf.timestamp() - asked


def must_be_alone(graph: tf.Graph) -> bool:
    """Whether several copies of this step in one graph would compute other numbers than separate runs, or fail.

    Each copy of an operation with two seeds, such as `tf.random.normal`, continues a sequence of its own. A
    collective operation can't be repeated.
    """
    described = graph.as_graph_def()
    nodes = itertools.chain(described.node, *(function.node_def for function in described.library.function))
    return any("seed2" in node.attr or node.op.startswith("Collective") for node in nodes)


def is_of_reading(error: tf.errors.OpError) -> bool:
    """Whether an error of a `LoopOfSteps` came from reading a batch, not from a step."""
    return _READING_FAILED.search(str(error)) is not None


class UnrolledSteps:
    """Computes a fixed number of steps on batches that were read before; their outcomes may stay on GPUs."""

    def __init__(self, step: Step, count: int, spec: Any):
        """Args:
        step: a step.
        count: number of steps.
        spec: spec of a batch.
        """

        def one_after_another(batches, rates):
            return [step(batch, rate) for batch, rate in zip(batches, rates, strict=True)]

        traced = tf.function(one_after_another, autograph=False)
        self._steps = traced.get_concrete_function([spec] * count, [_RATE] * count)

    def __call__(self, batches: Sequence[Any], rates: Sequence[float | tf.Tensor]) -> list[StepOutcome]:
        """Computes a step on each batch; the devices may still be computing the outcomes that this returns.

        Raises:
          tf.errors.OpError: a step failed.
        """
        with tf.device(HOST):  # a GPU would finish its work before it takes a number from Python
            given = [rate if isinstance(rate, tf.Tensor) else tf.constant(rate, tf.float32) for rate in rates]
        return self._steps(list(batches), given)
