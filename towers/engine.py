"""Towers on the devices of one process: the whole training step as graphs.

                 parameters, read once
               /          |          \\
    part 0 -> tower   part 1 -> tower   part 2 -> tower      each on its device
               \\          |          /
            sums -> mean -> clip -> update                   where the parameters live
"""

from collections.abc import Mapping

import keras
import tensorflow as tf

from towers import split, step
from towers.counters import Counters
from towers.devices import Devices
from towers.exchange import TowerExchange
from towers.options import StepOptions
from towers.placement import CentralPlacement
from towers.precision import loss_scaling_for
from towers.task import Batch, Task
from towers.tower import EvaluationFunction, EvaluationResult, TowerFunction, TowerResult


class TowersEngine:
    """Trains and evaluates batches on towers, parameters on a device of choice."""

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
        self._devices = devices
        self._shares = split.checked_shares(shares, devices.num_towers, "tower_shares")
        step.check_batch_size(task.batch_size, options.accumulation, self._shares)
        synced = options.batch_stats == "synced" and devices.num_towers > 1
        self.tower = TowerFunction(
            task,
            model,
            exchange=TowerExchange(devices.num_towers) if synced else None,
            fused_batch_norm=options.fused_batch_norm,
            xla=options.xla,
        )
        self._evaluation = EvaluationFunction(task, model, fused_batch_norm=options.fused_batch_norm)
        self.placement = CentralPlacement.of(self.tower.variables, options.rule, devices.parameters)
        with tf.device(step.HOST):
            self.counters = Counters.new(loss_scaling_for(options.precision))
        self._make_functions(batch_spec)

    def _make_functions(self, batch_spec):
        rate = tf.TensorSpec([], tf.float32)
        self.train_function = tf.function(self._train, input_signature=[batch_spec, rate], autograph=False)
        self.evaluate_function = tf.function(self._evaluate, input_signature=[batch_spec], autograph=False)
        self.first_function = tf.function(self._gather_first, input_signature=[batch_spec], autograph=False)
        self.more_function = tf.function(self._gather_more, autograph=False)
        self.finish_function = tf.function(self._apply, autograph=False)

    def train(self, batch: Batch, rate: float) -> step.StepOutcome:
        """One step on a global batch; returns scalars that may still be under way on their devices."""
        return step.train_accumulated(self, batch, tf.constant(rate, tf.float32), self.options.accumulation)

    def evaluate(self, batch: Batch) -> EvaluationResult:
        """Undivided loss and metrics of a batch."""
        return self.evaluate_function(batch)

    def parameters(self) -> Mapping[str, tf.Variable]:
        return self.placement.parameters

    def state(self) -> Mapping[str, tf.Variable]:
        return self.placement.state

    def slots(self) -> Mapping[str, Mapping[str, tf.Variable]]:
        return self.placement.slots

    def graph(self) -> tf.Graph:
        """The graph of a training step, for TensorBoard."""
        function = self.train_function if self.options.accumulation == 1 else self.first_function
        return function.get_concrete_function().graph

    def _train(self, batch, rate):
        parameters, state = self.placement.read()
        return self._apply(batch, self._gather(batch, 0, parameters, state), rate)

    def _gather_first(self, batch):
        parameters, state = self.placement.read()
        return self._gather(step.microbatch(batch, 0, self.options.accumulation), 0, parameters, state)

    def _gather_more(self, batch, place, sums):
        parameters, _ = self.placement.read()
        own = step.microbatch(batch, place, self.options.accumulation)
        # The statistics of the microbatches before this one are in the sums, not yet in the variables.
        result = self._gather(own, place, parameters, sums.new_state)
        with tf.device(self._devices.parameters):
            return step.add_results([sums, result], self.placement.sum)._replace(new_state=result.new_state)

    def _gather(self, batch, microbatch_place, parameters, state) -> TowerResult:
        """All towers' passes over a (micro)batch, summed."""
        loss_scale = self.counters.loss_scale.read_value()
        results = []
        for place, device in enumerate(self._devices.towers):
            with tf.device(step.HOST):
                part, busy = step.part(batch, place, self._shares)
                number = microbatch_place * len(self._devices.towers) + place
                seed = step.tower_seed(self.options.seed, self.counters.step.read_value(), number)
            with tf.device(device):
                results.append(self.tower(parameters, state, part, seed, busy * loss_scale))
        with tf.device(self._devices.parameters):
            new_state = step.combine_state(state, results, self.options.batch_stats)
            return step.add_results(results, self.placement.sum)._replace(new_state=new_state)

    def _apply(self, batch, sums, rate) -> step.StepOutcome:
        with tf.device(self._devices.parameters):
            mean = step.mean_gradients(sums, self.options, self.counters)
        with tf.device(step.HOST):
            may_update = step.may_update(mean, self.counters)
        tf.cond(may_update, lambda: self._update(mean, sums, rate), lambda: tf.constant(False))
        with tf.device(step.HOST):
            result = step.outcome(batch, sums, mean)
            step.count_step(batch, mean, self.options, self.counters)
            return result

    def _update(self, mean, sums, rate):
        self.placement.update(mean.gradients, self.options.rule, rate, self.counters.updates.read_value())
        for variable, value in zip(self.placement.state.values(), sums.new_state, strict=True):
            variable.assign(value)
        return tf.constant(True)

    def _evaluate(self, batch):
        parameters, state = self.placement.read()
        results = []
        for place, device in enumerate(self._devices.towers):
            with tf.device(step.HOST):
                part, busy = step.part(batch, place, self._shares)
            with tf.device(device):
                results.append(self._evaluation(parameters, state, part, busy))
        with tf.device(step.HOST):
            return step.add_evaluations(results)
