r"""A step on one worker of a ring: its own towers, and the sums over all workers.

    part 0 -> tower   part 1 -> tower         part 2 -> tower   part 3 -> tower
            \         /                               \         /
           sums of worker 0  <---- all-reduce ---->  sums of worker 1
                  |                                        |
      mean -> clip -> update                    mean -> clip -> update        the same bits on both

Parameters, state, slots and counters live on every worker. All workers make the same update from the same sums.
"""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from strategies.ring.collectives import WorkerExchange
from towers import batch_stats, gradients
from towers.devices import HOST
from towers.engine import Engine
from towers.exchange import TowerExchange
from towers.mean_and_update import finish_step
from towers.placement import CentralPlacement
from towers.sums import add_to, scalars_of, with_scalars
from towers.task import Batch, batch_length
from towers.tower import TowerResult
from towers.tower_parts import TowerParts
from towers.tower_passes import TowerPasses

# Greater than the keys of the workers' groups, which count from 2,000,000.
_FIRST_TOWERS_GROUP_KEY = 3_000_000


class RingSums(NamedTuple):
    """The sums over a (micro)batch.

    Attributes:
      towers: sums over all workers; only the gradients are this worker's own until `apply`.
      examples: int32 scalar, number of examples over all workers.
    """

    towers: TowerResult
    examples: tf.Tensor


class RingEngine(Engine):
    """Trains on this worker's part of each global batch."""

    def __init__(
        self,
        task,
        model,
        devices,
        options,
        *,
        batch_spec: Batch,
        shares: Sequence[float] | None,
        exchange: WorkerExchange,
        shares_by_worker: Sequence[Sequence[float]],
        stand_in: Batch,
    ):
        """Args:
        task, model, devices, options, batch_spec, shares: as for `Engine`.
        exchange: sums over the workers.
        shares_by_worker: shares of all towers, worker by worker.
        stand_in: a batch of one example, for the towers of a worker whose part of a batch is empty.

        Raises:
          UserError: a batch too small for all towers.
        """
        all_shares = [share for of_worker in shares_by_worker for share in of_worker]
        count = options.accumulation
        super().__init__(
            task,
            model,
            devices,
            options,
            batch_spec=batch_spec,
            shares=shares,
            all_shares=all_shares,
            tower_exchange=_exchange_of_all_towers(len(all_shares), exchange.channel),
            # With accumulation a step's batch is a tuple of microbatches.
            step_spec=batch_spec if count == 1 else (batch_spec,) * count,
        )
        self._exchange = exchange
        self.placement = CentralPlacement.of(self.tower.variables, options.rule, devices.parameters)
        parts = TowerParts(
            shares=self.shares,
            first_tower=sum(len(of_worker) for of_worker in shares_by_worker[: exchange.rank]),
            num_towers=len(all_shares),
            stand_in=tf.nest.map_structure(lambda tensor: tensor.numpy(), stand_in)
            if exchange.num_workers > 1
            else None,
        )
        self._passes = TowerPasses(self.tower, devices, parts, options)
        with tf.device(HOST):
            self._began = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self._busy = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def parameters(self) -> Mapping[str, tf.Variable]:
        return self.placement.parameters

    def state(self) -> Mapping[str, tf.Variable]:
        return self.placement.state

    def slots(self) -> Mapping[str, Mapping[str, tf.Variable]]:
        return self.placement.slots

    def take_busy_seconds(self) -> float:
        """Seconds that this worker's towers computed since the last call, without waiting for other workers."""
        seconds = float(self._busy)
        self._busy.assign(0.0)
        return seconds

    def train(self, batch, rate):
        """One step. With accumulation the batch is a tuple: this worker's part of each microbatch."""
        self._began.assign(time.time())
        if self.options.accumulation == 1:
            return super().train(batch, rate)
        first, *others = batch
        sums = self.first_function(first)
        for index, micro in enumerate(others, start=1):
            sums = self.more_function(micro, tf.constant(index), sums)
        return self.apply_function(batch, sums, tf.constant(rate, tf.float32))

    def first_sums(self, batch):
        parameters, state = self.placement.read()
        return self._sums_of(batch, 0, parameters, state)

    def more_sums(self, batch, microbatch_index, sums):
        parameters, _ = self.placement.read()
        own = self._sums_of(batch, microbatch_index, parameters, sums.towers.new_state)
        with tf.device(self.devices.parameters):
            added = add_to(sums.towers, own.towers, gradients.add_each)
            return RingSums(added, sums.examples + own.examples)

    def _sums_of(self, batch, microbatch_index, parameters, state) -> RingSums:
        """The sums over a (micro)batch. One collective exchanges all but the gradients, which are large."""
        step, loss_scale = self.counters.step.read_value(), self.counters.loss_scale.read_value()
        own = self._passes.train(batch, microbatch_index, parameters, state, step=step, loss_scale=loss_scale)
        policy = self.options.batch_stats
        with tf.device(self.devices.parameters):
            changes = batch_stats.changes(
                state, own.new_state, own.weight, is_first=self._exchange.rank == 0, batch_stats=policy
            )
            examples = tf.cast(batch_length(batch), tf.float32)
            summed = self._exchange.sum([*changes, examples, *scalars_of(own)])
            changes, (examples, *scalars) = summed[: len(changes)], summed[len(changes) :]
            summed = with_scalars(own, scalars)
            new_state = batch_stats.changed(state, changes, summed.weight, policy)
            return RingSums(summed._replace(new_state=new_state), tf.cast(examples, tf.int32))

    def apply(self, batch, sums, rate):
        own = sums.towers.gradients
        with tf.device(HOST):
            self._busy.assign_add(_time_of(own[0]) - self._began.read_value())
        with tf.device(self.devices.parameters):
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
        return self._passes.evaluate(self.evaluation, batch, *self.placement.read())


def _exchange_of_all_towers(num_towers: int, channel: int) -> TowerExchange | None:
    return TowerExchange(num_towers, group_key=_FIRST_TOWERS_GROUP_KEY + channel) if num_towers > 1 else None


def _time_of(gradient: gradients.Gradient) -> tf.Tensor:
    """Time at which this gradient was computed. A backward pass computes the first parameter's gradient last."""
    some = tf.reshape(gradients.values_of(gradient), [-1])[:1]
    # Not tf.timestamp, which is stateful: TensorFlow would run it after all earlier collectives.
    return tf.numpy_function(lambda _: time.time(), [some], tf.float64, stateful=False)
