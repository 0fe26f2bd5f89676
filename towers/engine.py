"""What every engine of one process has: the tower, the counters, and a step in one call or in several."""

import abc
import functools
from collections.abc import Mapping

import keras
import tensorflow as tf

from towers import split, step_end
from towers.counters import Counters
from towers.devices import Devices
from towers.exchange import TowerExchange
from towers.options import StepOptions
from towers.precision import loss_scaling_for
from towers.task import Batch, Task, batch_length
from towers.tower import EvaluationFunction, EvaluationResult, TowerFunction

_RATE = tf.TensorSpec([], tf.float32)


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
        step_end.check_batch_size(task.batch_size, options.accumulation, self.all_shares)
        kernels = options.kernels(devices)
        self.tower = TowerFunction(
            task,
            model,
            exchange=self._tower_exchange() if options.batch_stats == "synced" else None,
            kernels=kernels,
            xla=options.xla,
        )
        self.evaluation = EvaluationFunction(task, model, kernels=kernels)
        self.make_variables()
        with tf.device(step_end.HOST):
            self.counters = Counters.new(loss_scaling_for(options.precision))
        self._batch_spec = batch_spec
        self.train_function = _graph_of(self._train, batch_spec, _RATE)
        self.evaluate_function = _graph_of(self.evaluate_towers, batch_spec)
        self.first_function = _graph_of(self.gather_first, batch_spec)

    @property
    def all_shares(self) -> tuple[float, ...]:
        """Shares of all towers that divide a global batch, in the order of its parts."""
        return self.shares

    def _tower_exchange(self) -> TowerExchange | None:
        """Between the towers that share statistics."""
        return TowerExchange(self.devices.num_towers) if self.devices.num_towers > 1 else None

    @functools.cached_property
    def more_function(self):
        """`gather_more`, traced once: workers whose traces were not the same would not find each other."""
        return _graph_of(self.gather_more, self._batch_spec, tf.TensorSpec([], tf.int32), self._sums_spec)

    @functools.cached_property
    def finish_function(self):
        """`apply`, as `more_function`."""
        return _graph_of(self.apply, self._step_spec, self._sums_spec, _RATE)

    @property
    def _step_spec(self):
        """Of what `train` is given."""
        return self._batch_spec

    @property
    def _sums_spec(self):
        sums = self.first_function.get_concrete_function().structured_outputs
        return tf.nest.map_structure(tf.type_spec_from_value, sums)

    def train(self, batch: Batch, rate: float) -> step_end.StepOutcome:
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
    def apply(self, batch: Batch, sums, rate: tf.Tensor) -> step_end.StepOutcome:
        """Divides, checks, clips, updates and counts."""

    @abc.abstractmethod
    def evaluate_towers(self, batch: Batch) -> EvaluationResult:
        """The towers' evaluations of their parts, added up."""


def _graph_of(function, *signature):
    return tf.function(function, input_signature=signature, autograph=False)
