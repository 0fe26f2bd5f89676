r"""A step on one worker of a ring: its own towers, and the sums over all workers.

    part 0 -> tower   part 1 -> tower         part 2 -> tower   part 3 -> tower
            \         /                               \         /
           sums of worker 0  <---- all-reduce ---->  sums of worker 1
                  |                                        |
      mean -> clip -> update                    mean -> clip -> update        the same bits on both

Parameters, state, slots and counters live on every worker. All workers make the same update from the same sums.
If a tower is several devices, each device sums, exchanges and updates the parameters that it holds. With
`strategies.ring.zero.zero_placement` each worker gets the sums of its own parts and makes their update; with
`strategies.ring.zero.gathered_placement` it also holds only its own parts of the parameters.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies.busy_time import BusyTime
from strategies.ring.exchange.collectives import WorkerExchange
from strategies.worker_sums import WorkerSums, added, summed_except_gradients
from towers import batch_stats
from towers.devices import HOST
from towers.engine import Engine
from towers.input.placed_batch import examples_of, features_by_device
from towers.input.tower_parts import TowerParts
from towers.mean_and_update import finish_step
from towers.parameters.placement import Placement
from towers.timeline.activities import EXCHANGE_SCOPE
from towers.tower import ModelVariables
from towers.tower_passes import TowerPasses
from towers.updates.rules import UpdateRule


class RingEngine(Engine):
    """Trains on this worker's part of each global batch."""

    def __init__(
        self,
        *arguments,
        exchange: WorkerExchange,
        parts: TowerParts,
        place: Callable[[ModelVariables, UpdateRule], Placement],
        make_towers: Callable[[Engine], tuple[Sequence[Callable], Sequence[Callable]]] | None = None,
        microbatches: int | None = None,
        **named,
    ):
        """Args:
        exchange: sums over the workers.
        parts: how the towers of this process divide its part of a batch.
        place: makes the placement of the model's variables, whose owners sum gradients over the workers.
        make_towers: as for `towers.one_process_engine.OneProcessEngine`; it may make a single pass that computes
          all towers, as for `TowerPasses`. None for towers of one device, each with its own pass.
        microbatches: as for `TowerPasses`. A step's batch is then a tuple of this worker's part of each
          microbatch, or a batch if there is only one.
        *arguments, **named: as for `Engine`.

        Raises:
          UserError: the batch is too small for all towers.
        """
        super().__init__(*arguments, parts=parts, microbatches=microbatches, **named)
        self._exchange = exchange
        self.placement = place(self.tower.variables, self.options.rule)
        if make_towers is not None:
            self.towers, self.evaluations = make_towers(self)
        self._compiles_first = make_towers is None
        self._at_once = microbatches or 1
        own = self.placement.owners.of_towers
        self._passes = TowerPasses(
            self.towers, self.devices, parts, self.options, own, microbatches, sum_all=exchange.sum
        )
        self.busy = BusyTime()

    def train(self, batch, rate):
        self.busy.start()
        if self._at_once > 1 and self.options.accumulation > 1:
            firsts = range(0, len(batch), self._at_once)
            batch = tuple(batch[first : first + self._at_once] for first in firsts)
        return super().train(batch, rate)

    def first_sums(self, batch):
        parameters, state = self.placement.read()
        return self._sums_of(batch, 0, parameters, state)

    def more_sums(self, batch, microbatch_index, sums):
        parameters, state = self.placement.read()
        state = batch_stats.after(state, sums.towers.new_state)
        own = self._sums_of(batch, microbatch_index, parameters, state)
        with tf.device(self.devices.parameters):
            return added(sums, own, self.placement.owners.add)

    def _sums_of(self, batch, microbatch_index, parameters, state) -> WorkerSums:
        step, loss_scale = self.counters.read_index(), self.counters.loss_scale.read_value()
        own = self._passes.train(batch, microbatch_index, parameters, state, step=step, loss_scale=loss_scale)
        with tf.device(self.devices.parameters), tf.name_scope(EXCHANGE_SCOPE):
            sums = summed_except_gradients(
                own,
                state,
                examples_of(batch),
                self._exchange.sum,
                is_first=self._exchange.rank == 0,
                policy=self.options.batch_stats,
            )
            if not self.masked:  # on GPUs the host's clock would wait for the gradients of each step
                self.busy.stop([*tf.nest.flatten(own.gradients), own.loss_sum])
            kept = self.placement.owners.keep([own.gradients])
            return sums._replace(towers=sums.towers._replace(gradients=kept))

    def apply(self, batch, sums, rate):
        with tf.device(self.devices.parameters), tf.name_scope(EXCHANGE_SCOPE):
            summed = sums.towers._replace(gradients=self.placement.owners.meet(sums.towers.gradients))
        return finish_step(
            summed,
            rate,
            examples=sums.examples,
            features=features_by_device(batch, HOST, self.devices.towers),
            placement=self.placement,
            device=self.devices.parameters,
            options=self.options,
            counters=self.counters,
            masked=self.masked,
        )

    @property
    def notices(self):
        notice = getattr(self.placement, "notice", None)
        return [*super().notices, *([notice] if notice else [])]

    def evaluate_towers(self, batch):
        return self._passes.evaluate(self.evaluations, batch, *self.placement.read())
