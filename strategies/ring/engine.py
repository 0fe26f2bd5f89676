"""Towers on this worker's devices, and the sums of all workers.

    part 0 -> tower   part 1 -> tower         part 2 -> tower   part 3 -> tower
            \\         /                               \\         /
           sums of worker 0  <---- all-reduce ---->  sums of worker 1
                  |                                        |
      mean -> clip -> update                    mean -> clip -> update        the same bits on both

Parameters, state, slots and counters live on every worker; from the same sums all make the same update.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from strategies.ring.worker_exchange import WorkerExchange
from towers import gradients, step_end
from towers.exchange import TowerExchange
from towers.task import Batch, WeightedValue, batch_length
from towers.tower import TowerResult
from towers.towers_engine import TowersEngine

# Beyond those of workers (from 2,000,000).
_FIRST_TOWERS_GROUP_KEY = 3_000_000


class RingSums(NamedTuple):
    """A (micro)batch's sums: of all workers, but for the gradients, which are still this worker's own.

    Attributes:
      towers: see above.
      examples: int32 scalar, over all workers.
    """

    towers: TowerResult
    examples: tf.Tensor


class RingEngine(TowersEngine):
    """As its base class, on this worker's part of each global batch."""

    def __init__(
        self,
        *arguments,
        exchange: WorkerExchange,
        shares_by_worker: Sequence[Sequence[float]],
        stand_in: Batch,
        **named,
    ):
        """Args:
        exchange: with the other workers.
        shares_by_worker: shares of all towers, worker by worker.
        stand_in: a batch of one example, which idle towers are given when this worker has none.
        *arguments, **named: as the base class.

        Raises:
          UserError: a batch too small for all towers.
        """
        self._exchange, self._shares_by_worker = exchange, shares_by_worker
        self._stand_in = tf.nest.map_structure(lambda tensor: tensor.numpy(), stand_in)
        super().__init__(*arguments, **named)

    @property
    def all_shares(self):
        return tuple(share for of_worker in self._shares_by_worker for share in of_worker)

    def _tower_exchange(self):
        count = len(self.all_shares)
        if count == 1:
            return None
        return TowerExchange(count, group_key=_FIRST_TOWERS_GROUP_KEY + self._exchange.channel)

    def make_variables(self):
        super().make_variables()
        with tf.device(step_end.HOST):
            self._began = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self._busy = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def take_busy_seconds(self) -> float:
        """Time this worker's own towers took since it was last asked; waiting for the others is not in it."""
        seconds = float(self._busy)
        self._busy.assign(0.0)
        return seconds

    def train(self, batch, rate):
        """As the base class; with accumulation the batch is a tuple of microbatches, each this worker's part."""
        self._began.assign(time.time())
        if self.options.accumulation == 1:
            return super().train(batch, rate)
        first, *others = batch
        sums = self.first_function(first)
        for place, micro in enumerate(others, start=1):
            sums = self.more_function(micro, tf.constant(place), sums)
        return self.finish_function(batch, sums, tf.constant(rate, tf.float32))

    @property
    def _step_spec(self):
        count = self.options.accumulation
        return super()._step_spec if count == 1 else (super()._step_spec,) * count

    def gather_first(self, batch):
        parameters, state = self.placement.read()
        return self._meet(batch, 0, parameters, state)

    def gather_more(self, batch, place, sums):
        parameters, _ = self.placement.read()
        own = self._meet(batch, place, parameters, sums.towers.new_state)
        with tf.device(self.devices.parameters):
            added = step_end.add_results([sums.towers, own.towers], self.placement.sum)
            return RingSums(added._replace(new_state=own.towers.new_state), sums.examples + own.examples)

    def _meet(self, batch, place, parameters, state) -> RingSums:
        """The own towers' passes; everything but gradients is small and meets at once, in one collective."""
        own = self._gather(batch, place, parameters, state)
        policy = self.options.batch_stats
        with tf.device(self.devices.parameters):
            changes = step_end.changes_of_state(state, own, first=self._exchange.rank == 0, batch_stats=policy)
            examples = tf.cast(batch_length(batch), tf.float32)
            scalars = [own.loss_sum, examples, *(part for value in own.metric_sums.values() for part in value)]
            summed = self._exchange.sum([*changes, *scalars])
            changes, (loss_sum, examples, *metrics) = summed[: len(changes)], summed[len(changes) :]
            pairs = zip(metrics[::2], metrics[1::2], strict=True)
            met = TowerResult(
                loss_sum,
                changes[0],
                own.gradients,
                step_end.changed_state(state, changes, policy),
                dict(zip(own.metric_sums, (WeightedValue(*pair) for pair in pairs), strict=True)),
            )
            return RingSums(met, tf.cast(examples, tf.int32))

    def _part(self, batch, place):
        if self._exchange.num_workers == 1:
            return super()._part(batch, place)
        return step_end.part_or_stand_in(batch, self._stand_in, place, self.shares)

    def _tower_number(self, microbatch_place, place):
        before = sum(len(of_worker) for of_worker in self._shares_by_worker[: self._exchange.rank])
        return microbatch_place * len(self.all_shares) + before + place

    def apply(self, batch, sums, rate):
        own = sums.towers.gradients
        with tf.device(step_end.HOST):
            self._busy.assign_add(_time_of(own[0]) - self._began.read_value())
        with tf.device(self.devices.parameters):
            met = sums.towers._replace(gradients=self._exchange.sum_gradients(own))
        microbatches = (batch,) if isinstance(batch, Batch) else batch
        return self._finish(met, sums.examples, [micro.features for micro in microbatches], rate)


def _time_of(gradient: gradients.Gradient) -> tf.Tensor:
    """When this was computed; the first parameter's gradient is the last of a backward pass."""
    some = tf.reshape(gradients.values_of(gradient), [-1])[:1]
    # tf.timestamp has an effect as TensorFlow sees it, and would be put after the collectives before it.
    return tf.numpy_function(lambda _: time.time(), [some], tf.float64, stateful=False)
