"""Starts the training steps of a process: one in an execution of a graph, or several.

batches and outcomes on the host     a loop in the graph, which reads the batches of its steps
on GPUs                              a graph of so many steps, on batches that the host has read before
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

import keras
import tensorflow as tf
from tensorflow.python.framework import config  # whether operations are deterministic has no public name

from strategies.data_checks.data_errors import readable_errors, readable_tracing
from strategies.steps.execution_length import ExecutionLength
from strategies.steps.training_batches import TrainingBatches
from towers.engine import Engine
from towers.errors import UserError
from towers.execution import LoopOfSteps, UnrolledSteps, is_of_reading, must_be_alone
from towers.mean_and_update import StepOutcome
from towers.task import Batch


def reads_in_graph(engine: Engine) -> bool:
    """Whether batches and outcomes are on the host, as a loop in a graph requires."""
    return engine.placed_input is None and not engine.masked


class Executions:
    """The steps of an engine.

    Attributes:
      input_seconds: seconds that the steps waited for batches since the caller set it to 0.
    """

    input_seconds = 0.0
    _loop: LoopOfSteps | None = None
    _unrolled: UnrolledSteps | None = None
    # The outcome of the latest step that ran alone.
    _latest: StepOutcome | None = None

    def __init__(
        self,
        engine: Engine,
        model: keras.Model,
        rate: Callable[[int], float],
        batches: TrainingBatches,
        next_batch: Callable[[int], Batch],
        length: ExecutionLength,
    ):
        """Args:
        engine: computes the steps.
        model: the template, for errors.
        rate: function from a step to its learning rate.
        batches: the training batches, from which a loop in a graph reads.
        next_batch: function from a step to its batch, on the devices where the engine reads it.
        length: length of an execution, in steps.
        """
        self._engine, self._model, self._rate = engine, model, rate
        self._batches, self._next_batch, self._length = batches, next_batch, length

    def started(self, first: int, num_steps: int) -> Iterator[Sequence[StepOutcome]]:
        """Starts steps, execution after execution; yields the outcomes of each execution.

        Raises:
          UserError: the data ended, can't be read, or don't fit the model; earlier steps are applied.
        """
        together = self._steps_together
        # A loop over steps needs the outcome of a step as an example, and the first step compiles kernels ahead.
        num_alone = num_steps if together == 1 or num_steps <= 1 else int(self._latest is None)
        for step, rate in self._with_rates(first, num_alone):
            self._latest = self._alone(step, rate)
            yield [self._latest]
        end = first + num_steps
        for begin in range(first + num_alone, end, together):
            steps = range(begin, min(begin + together, end))
            if reads_in_graph(self._engine):
                yield self._in_loop(steps)
            elif len(steps) == together:
                yield self._in_a_row(steps)
            else:
                yield [self._alone(step, rate) for step, rate in self._with_rates(begin, len(steps))]

    @property
    def _steps_together(self) -> int:
        """Number of steps in the next executions."""
        steps = self._length.steps
        # A user's program may enable determinism after it creates the strategy.
        return 1 if steps == 1 or config.is_op_determinism_enabled() or self._must_be_alone else steps

    @functools.cached_property
    def _must_be_alone(self) -> bool:
        with readable_tracing("training"):
            return must_be_alone(self._engine.graph())

    def _in_loop(self, steps: range) -> Sequence[StepOutcome]:
        """Starts some steps in one execution that reads their batches."""
        iterator = self._batches.iterator(steps)
        if self._loop is None:
            self._loop = LoopOfSteps(self._engine.train_in_graph, elements=iterator, like=self._latest)
        try:
            outcomes, waited_seconds = self._loop(iterator, [self._rate(step) for step in steps])
        except tf.errors.OpError as error:
            self._raise_as_alone(error, steps[int(self._loop.begun)])
        self.input_seconds += waited_seconds
        return outcomes

    def _in_a_row(self, steps: range) -> Sequence[StepOutcome]:
        """Starts some steps in one execution on batches that are read before."""
        if self._unrolled is None:
            self._unrolled = UnrolledSteps(self._engine.train_in_graph, len(steps), self._engine.spec)
        batches: list[Batch] = []
        rates = self._engine.rates([self._rate(step) for step in steps])
        try:
            for step in steps:
                batches.append(self._timed_batch(step))
        except UserError:
            for batch, rate in zip(batches, rates, strict=False):  # earlier steps are applied
                self._engine.train(batch, rate)
            raise
        try:
            return self._unrolled(batches, rates)
        except tf.errors.OpError as error:
            self._raise_as_alone(error, int(self._engine.counters.step))

    def _raise_as_alone(self, error: tf.errors.OpError, step: int) -> NoReturn:
        """Raises the error of a step, which failed in an execution of several, as if it ran alone."""
        if is_of_reading(error):
            raise self._batches.error_of(error, step) from error
        with readable_errors(f"step {step}", self._model, lambda: self._batches.again(step)):
            raise error

    def _with_rates(self, first: int, num_steps: int) -> Iterable[tuple[int, float | tf.Tensor]]:
        """(index, learning rate for the engine) of some steps."""
        steps = range(first, first + num_steps)
        return zip(steps, self._engine.rates([self._rate(step) for step in steps]), strict=True)

    def _alone(self, step: int, rate: float | tf.Tensor) -> StepOutcome:
        batch = self._timed_batch(step)
        with readable_errors(f"step {step}", self._model, batch):
            return self._engine.train(batch, rate)

    def _timed_batch(self, step: int) -> Batch:
        asked = time.perf_counter()
        batch = self._next_batch(step)
        self.input_seconds += time.perf_counter() - asked
        return batch
