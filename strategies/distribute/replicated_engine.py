r"""A step on the replicas of a tf.distribute strategy: MirroredStrategy or MultiWorkerMirroredStrategy.

    part 0 -> tower   part 1 -> tower        towers of replica 0, and so on for each replica
            \         /
         sums of replica 0  <---- all-reduce of the strategy ---->  sums of the other replicas
                |                                                          |
     mean -> clip -> update copy 0                              mean -> clip -> update copies

Each GPU is a replica with one tower. On CPUs a process is one replica with all its towers.
"""

import dataclasses

import tensorflow as tf

from strategies.busy_time import BusyTime
from strategies.distribute.replica_exchange import ReplicaExchange
from strategies.distribute.replicated_placement import ReplicatedPlacement
from strategies.worker_sums import WorkerSums, added, summed_except_gradients
from towers import batch_stats
from towers.devices import HOST
from towers.engine import Engine
from towers.input.placed_batch import examples_of, features_by_device
from towers.input.tower_parts import TowerParts, microbatch
from towers.mean_and_update import count_step, finish_run, updated
from towers.sums import add_evaluations
from towers.timeline.activities import EXCHANGE_SCOPE
from towers.tower_passes import TowerPasses


class ReplicatedEngine(Engine):
    """Trains and evaluates batches; every replica has a copy of the variables."""

    def __init__(
        self,
        *arguments,
        strategy: tf.distribute.Strategy,
        parts: TowerParts,
        wire_precision: str = "float32",
        **named,
    ):
        """Args:
        strategy: provides the replicas of this process, the variables and the sums over all replicas.
        parts: how the towers of this process divide a batch.
        wire_precision: as for `ReplicaExchange`.
        *arguments, **named: as for `Engine`. The number of towers is a multiple of the number of replicas.
        """
        self._strategy = strategy
        super().__init__(*arguments, parts=parts, **named)
        self._exchange = ReplicaExchange(wire_precision)
        self.placement = ReplicatedPlacement(strategy, self.tower.variables, self.options.rule)
        replicas = strategy.extended.worker_devices
        count = self.devices.num_towers // len(replicas)
        self._replicas = [
            dataclasses.replace(
                self.devices, towers=self.devices.towers[begin : begin + count], parameters=replica
            )
            for begin, replica in zip(range(0, self.devices.num_towers, count), replicas, strict=True)
        ]
        self._passes = [
            TowerPasses(self.towers, replica, dataclasses.replace(parts, begin=index * count), self.options)
            for index, replica in enumerate(self._replicas)
        ]
        self.busy = BusyTime()

    def _updating_device(self):
        return self._strategy.extended.worker_devices[0]

    def train(self, batch, rate):
        self.busy.start()
        return super().train(batch, rate)

    def first_sums(self, batch):
        """Each replica's own sums over the first microbatch; PerReplica values for several replicas."""

        def replica(batch):
            parameters, state = self.placement.read()
            return self._replica_sums(batch, 0, parameters, state)

        return self._strategy.run(replica, args=(batch,))

    def more_sums(self, batch, microbatch_index, sums):
        def replica(batch, sums):
            parameters, state = self.placement.read()
            state = batch_stats.after(state, sums.towers.new_state)
            own = self._replica_sums(batch, microbatch_index, parameters, state)
            return added(sums, own)

        return self._strategy.run(replica, args=(batch, sums))

    def _replica_sums(self, batch, microbatch_index, parameters, state) -> WorkerSums:
        """The sums over a (micro)batch; only the gradients are this replica's own."""
        replica, is_first = self._replica()
        given = (
            batch if self._gets_microbatches else microbatch(batch, microbatch_index, self.options.accumulation)
        )
        own = self._passes[replica].train(
            given,
            microbatch_index,
            parameters,
            state,
            step=self.counters.read_index(),
            loss_scale=self.counters.loss_scale.read_value(),
        )
        # The replicas of a process divide the same batch, so one of them counts its examples.
        examples = examples_of(given) if replica == 0 else tf.constant(0)
        with tf.name_scope(EXCHANGE_SCOPE):
            return summed_except_gradients(
                own, state, examples, self._exchange.sum, is_first=is_first, policy=self.options.batch_stats
            )

    @property
    def _gets_microbatches(self) -> bool:
        """Whether a batch is already this process's part of one microbatch."""
        return self._step_spec is not self._batch_spec

    def _replica(self) -> tuple[int, bool]:
        """Index of this replica in its process, and whether it is the first of all; known during tracing."""
        context = tf.distribute.get_replica_context()
        index = int(tf.get_static_value(context.replica_id_in_sync_group))
        # Every process has the same number of replicas.
        return index % len(self._replicas), index == 0

    def apply(self, batch, sums, rate):
        outcomes = self._strategy.run(self._replica_apply, args=(batch, sums, rate))
        # All replicas have equal results, computed from the same sums; the step counts once.
        found, mean = tf.nest.map_structure(self._of_first_replica, outcomes)
        count_step(found.examples, mean, self.options, self.counters)
        finish_run(self.placement, self.options, self.counters, masked=self.masked)
        return found

    def _of_first_replica(self, value):
        return self._strategy.experimental_local_results(value)[0]

    def _replica_apply(self, batch, sums, rate):
        replica, _ = self._replica()
        own = sums.towers.gradients
        if replica == 0 and not self.masked:  # on GPUs the clock would wait for the gradients of each step
            self.busy.stop(own)
        with tf.name_scope(EXCHANGE_SCOPE):
            summed = self._exchange.sum_gradients(own)
        return updated(
            sums.towers._replace(gradients=summed),
            rate,
            examples=sums.examples,
            features=features_by_device(batch, HOST, self.devices.towers),
            placement=self.placement,
            device=self._replicas[replica].parameters,
            options=self.options,
            counters=self.counters,
            masked=self.masked,
        )

    def evaluate_towers(self, batch):
        def replica(batch):
            index, _ = self._replica()
            return self._passes[index].evaluate(self.evaluations, batch, *self.placement.read())

        results = self._strategy.run(replica, args=(batch,))
        local = [self._strategy.experimental_local_results(value) for value in tf.nest.flatten(results)]
        with tf.device(HOST):
            return add_evaluations(
                [tf.nest.pack_sequence_as(results, of_replica) for of_replica in zip(*local, strict=True)]
            )
