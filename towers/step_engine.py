"""What every engine of one process has: the tower, the counters, and a step in one call or in several."""

import abc
from collections.abc import Mapping

import keras
import tensorflow as tf

from towers import split, step
from towers.counters import Counters
from towers.devices import Devices
from towers.exchange import TowerExchange
from towers.options import StepOptions
from towers.precision import loss_scaling_for
from towers.task import Batch, Task, batch_length
from towers.tower import EvaluationFunction, EvaluationResult, TowerFunction


class StepEngine(abc.ABC):
    """Trains and evaluates global batches. Where variables live and gradients meet is the subclass's.

    A step is `gather_first` on the first microbatch, `gather_more` on each other one, then `apply`; undivided,
    the first and the last are one graph.
    """

    def __init__(
        self,
        task: Task,
        model: keras.Model,
        devices: Devices,
        options: StepOptions,
        *,
        batch_spec: Batch,
        shares: tuple[float, ...] | None = None,
    ):
        """Args:
        task: gives the loss and the metrics.
        model: a built template.
        devices: of the towers and the parameters.
        options: of the step.
        batch_spec: the spec of a batch, dimension 0 open.
        shares: how much of a batch each tower takes; None is equal parts.

        Raises:
          UserError: shares that don't match the towers, or a batch too small for all towers.
        """
        self.options = options
        self.devices = devices
        self.shares = split.checked_shares(shares, devices.num_towers, "tower_shares")
        step.check_batch_size(task.batch_size, options.accumulation, self.shares)
        synced = options.batch_stats == "synced" and devices.num_towers > 1
        self.tower = TowerFunction(
            task,
            model,
            exchange=TowerExchange(devices.num_towers) if synced else None,
            fused_batch_norm=options.fused_batch_norm,
            xla=options.xla,
        )
        self.evaluation = EvaluationFunction(task, model, fused_batch_norm=options.fused_batch_norm)
        self.make_variables()
        with tf.device(step.HOST):
            self.counters = Counters.new(loss_scaling_for(options.precision))
        rate = tf.TensorSpec([], tf.float32)
        self.train_function = tf.function(self._train, input_signature=[batch_spec, rate], autograph=False)
        self.evaluate_function = tf.function(self.evaluate_towers, input_signature=[batch_spec], autograph=False)
        self.first_function = tf.function(self.gather_first, input_signature=[batch_spec], autograph=False)
        self.more_function = tf.function(self.gather_more, autograph=False)
        self.finish_function = tf.function(self.apply, autograph=False)

    def train(self, batch: Batch, rate: float) -> step.StepOutcome:
        """One step on a global batch; returns scalars that may still be under way on their devices.

        Each microbatch is a call of its own: memory is that of one, and the graph does not grow with them.
        """
        rate = tf.constant(rate, tf.float32)
        if self.options.accumulation == 1:
            return self.train_function(batch, rate)
        sizes = split.sizes(int(batch_length(batch)), split.even_shares(self.options.accumulation))
        sums = self.first_function(batch)
        for place, size in enumerate(sizes[1:], start=1):
            # A last batch of fewer examples than microbatches leaves some empty: kernels refuse empty tensors.
            if size > 0:
                sums = self.more_function(batch, tf.constant(place), sums)
        return self.finish_function(batch, sums, rate)

    def evaluate(self, batch: Batch) -> EvaluationResult:
        """Undivided loss and metrics of a batch."""
        return self.evaluate_function(batch)

    def graph(self) -> tf.Graph:
        """The graph of a training step, for TensorBoard."""
        function = self.train_function if self.options.accumulation == 1 else self.first_function
        return function.get_concrete_function().graph

    def _train(self, batch, rate):
        return self.apply(batch, self.gather_first(batch), rate)

    @abc.abstractmethod
    def make_variables(self) -> None:
        """Makes parameters, state and slots with the template's values, before anything is traced."""

    @abc.abstractmethod
    def parameters(self) -> Mapping[str, tf.Variable]:
        """By canonical name."""

    @abc.abstractmethod
    def state(self) -> Mapping[str, tf.Variable]:
        """By canonical name."""

    @abc.abstractmethod
    def slots(self) -> Mapping[str, Mapping[str, tf.Variable]]:
        """By slot name and canonical name."""

    @abc.abstractmethod
    def gather_first(self, batch: Batch):
        """The towers' sums over the first microbatch."""

    @abc.abstractmethod
    def gather_more(self, batch: Batch, place: tf.Tensor, sums):
        """`sums` and those over microbatch `place`."""

    @abc.abstractmethod
    def apply(self, batch: Batch, sums, rate: tf.Tensor) -> step.StepOutcome:
        """Divides, checks, clips, updates and counts."""

    @abc.abstractmethod
    def evaluate_towers(self, batch: Batch) -> EvaluationResult:
        """The towers' evaluations of their parts, added up."""
