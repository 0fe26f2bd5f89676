r"""A step on one worker of a ring: its own towers, and the sums over all workers.

    part 0 -> tower   part 1 -> tower         part 2 -> tower   part 3 -> tower
            \         /                               \         /
           sums of worker 0  <---- all-reduce ---->  sums of worker 1
                  |                                        |
      mean -> clip -> update                    mean -> clip -> update        the same bits on both

Parameters, state, slots and counters live on every worker. All workers make the same update from the same sums.
"""

import tensorflow as tf

from strategies.busy_time import BusyTime
from strategies.ring.collectives import WorkerExchange
from strategies.worker_sums import WorkerSums, added, summed_except_gradients
from towers.engine import Engine
from towers.mean_and_update import finish_step
from towers.placement import CentralPlacement
from towers.task import Batch, batch_length
from towers.timeline.activities import EXCHANGE_SCOPE
from towers.tower_parts import TowerParts
from towers.tower_passes import TowerPasses


class RingEngine(Engine):
    """Trains on this worker's part of each global batch."""

    def __init__(self, *arguments, exchange: WorkerExchange, parts: TowerParts, **named):
        """Args:
        exchange: sums over the workers.
        parts: how the towers of this process divide its part of a batch.
        *arguments, **named: as for `Engine`.

        Raises:
          UserError: a batch too small for all towers.
        """
        super().__init__(*arguments, **named)
        self._exchange = exchange
        self.placement = CentralPlacement.of(self.tower.variables, self.options.rule, self.devices.parameters)
        self._passes = TowerPasses(self.towers, self.devices, parts, self.options)
        self.busy = BusyTime()

    def train(self, batch, rate):
        self.busy.start()
        return super().train(batch, rate)

    def first_sums(self, batch):
        parameters, state = self.placement.read()
        return self._sums_of(batch, 0, parameters, state)

    def more_sums(self, batch, microbatch_index, sums):
        parameters, _ = self.placement.read()
        own = self._sums_of(batch, microbatch_index, parameters, sums.towers.new_state)
        with tf.device(self.devices.parameters):
            return added(sums, own)

    def _sums_of(self, batch, microbatch_index, parameters, state) -> WorkerSums:
        step, loss_scale = self.counters.step.read_value(), self.counters.loss_scale.read_value()
        own = self._passes.train(batch, microbatch_index, parameters, state, step=step, loss_scale=loss_scale)
        with tf.device(self.devices.parameters), tf.name_scope(EXCHANGE_SCOPE):
            return summed_except_gradients(
                own,
                state,
                batch_length(batch),
                self._exchange.sum,
                is_first=self._exchange.rank == 0,
                policy=self.options.batch_stats,
            )

    def apply(self, batch, sums, rate):
        own = sums.towers.gradients
        self.busy.stop(own)
        with tf.device(self.devices.parameters), tf.name_scope(EXCHANGE_SCOPE):
            if not self._exchange.sends_any_number_of_rows:
                own = [
                    tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
                    for gradient, variable in zip(own, self.placement.parameters.values(), strict=True)
                ]
            summed = sums.towers._replace(gradients=self._exchange.sum_gradients(own))
        microbatches = (batch,) if isinstance(batch, Batch) else batch
        return finish_step(
            summed,
            rate,
            examples=sums.examples,
            features=[micro.features for micro in microbatches],
            placement=self.placement,
            device=self.devices.parameters,
            options=self.options,
            counters=self.counters,
        )

    def evaluate_towers(self, batch):
        return self._passes.evaluate(self.evaluations, batch, *self.placement.read())
