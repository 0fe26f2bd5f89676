"""Towers on the devices of one process: the whole training step as graphs.

                 parameters, read once
               /          |          \\
    part 0 -> tower   part 1 -> tower   part 2 -> tower      each on its device
               \\          |          /
            sums -> mean -> clip -> update                   where the parameters live
"""

from collections.abc import Mapping

import tensorflow as tf

from towers import step_end
from towers.engine import StepEngine
from towers.placement import CentralPlacement
from towers.task import batch_length
from towers.tower import TowerResult


class TowersEngine(StepEngine):
    """Trains and evaluates batches on towers, parameters on a device of choice."""

    def make_variables(self) -> None:
        self.placement = CentralPlacement.of(self.tower.variables, self.options.rule, self.devices.parameters)

    def parameters(self) -> Mapping[str, tf.Variable]:
        return self.placement.parameters

    def state(self) -> Mapping[str, tf.Variable]:
        return self.placement.state

    def slots(self) -> Mapping[str, Mapping[str, tf.Variable]]:
        return self.placement.slots

    def gather_first(self, batch):
        parameters, state = self.placement.read()
        return self._gather(step_end.microbatch(batch, 0, self.options.accumulation), 0, parameters, state)

    def gather_more(self, batch, place, sums):
        parameters, _ = self.placement.read()
        own = step_end.microbatch(batch, place, self.options.accumulation)
        # The statistics of the microbatches before this one are in the sums, not yet in the variables.
        result = self._gather(own, place, parameters, sums.new_state)
        with tf.device(self.devices.parameters):
            return step_end.add_results([sums, result], self.placement.sum)._replace(new_state=result.new_state)

    def _gather(self, batch, microbatch_place, parameters, state) -> TowerResult:
        """All towers' passes over a (micro)batch, summed."""
        loss_scale = self.counters.loss_scale.read_value()
        results = []
        for place, device in enumerate(self.devices.towers):
            with tf.device(step_end.HOST):
                part, busy = self._part(batch, place)
                number = self._tower_number(microbatch_place, place)
                seed = step_end.tower_seed(self.options.seed, self.counters.step.read_value(), number)
            with tf.device(device):
                results.append(self.tower(parameters, state, part, seed, busy * loss_scale))
        with tf.device(self.devices.parameters):
            new_state = step_end.combine_state(state, results, self.options.batch_stats)
            return step_end.add_results(results, self.placement.sum)._replace(new_state=new_state)

    def _part(self, batch, place):
        """The part of a tower here, and whether it has something to do, as `towers.step_end.part`."""
        return step_end.part(batch, place, self.shares)

    def _tower_number(self, microbatch_place, place):
        """Counts the passes of a step, for seeds."""
        return microbatch_place * len(self.devices.towers) + place

    def apply(self, batch, sums, rate) -> step_end.StepOutcome:
        return self._finish(sums, batch_length(batch), batch.features, rate)

    def _finish(self, sums: TowerResult, examples, features, rate) -> step_end.StepOutcome:
        """The end of a step, given the sums over all towers."""
        with tf.device(self.devices.parameters):
            mean = step_end.mean_gradients(sums, self.options, self.counters)
        with tf.device(step_end.HOST):
            may_update = step_end.may_update(mean, self.counters)
        tf.cond(may_update, lambda: self._update(mean, sums, rate), lambda: tf.constant(False))
        with tf.device(step_end.HOST):
            result = step_end.outcome(examples, features, sums, mean)
            step_end.count_step(examples, mean, self.options, self.counters)
            return result

    def _update(self, mean, sums, rate):
        self.placement.update(mean.gradients, self.options.rule, rate, self.counters.updates.read_value())
        for variable, value in zip(self.placement.state.values(), sums.new_state, strict=True):
            variable.assign(value)
        return tf.constant(True)

    def evaluate_towers(self, batch):
        parameters, state = self.placement.read()
        results = []
        for place, device in enumerate(self.devices.towers):
            with tf.device(step_end.HOST):
                part, busy = self._part(batch, place)
            with tf.device(device):
                results.append(self.evaluation(parameters, state, part, busy))
        with tf.device(step_end.HOST):
            return step_end.add_evaluations(results)
