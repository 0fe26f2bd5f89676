r"""MirroredStrategy of tf.distribute around the same tower function, for comparison.

    part 0 -> replica 0   part 1 -> replica 1      parameters, state and slots on each
                  \          /
                  all-reduce                       the same sums on each
                  /          \
           update 0          update 1
"""

from collections.abc import Mapping

import tensorflow as tf

from strategies.synchronous import SynchronousStrategy
from towers import batch_stats, gradients
from towers.devices import HOST, Devices
from towers.engine import Engine
from towers.mean_and_update import count_step, may_update, mean_gradients, outcome
from towers.options import StepOptions
from towers.placement import apply_rule, constraints_of, make_slots, variables_like
from towers.sums import add_evaluations, add_to, scalars_of, with_scalars
from towers.task import Task, batch_length
from towers.tower import TowerResult
from towers.tower_parts import TowerParts, microbatch
from towers.tower_passes import tower_seed


def mirrored_strategy(
    task: Task, devices: Devices, options: StepOptions, *, shares: tuple[float, ...] | None = None
) -> SynchronousStrategy:
    """The strategy 'mirrored'. Parameters live on every tower's device; `devices.parameters` is ignored.

    Raises:
      UserError: shares that don't fit the towers, or a batch too small for all of them.
    """

    def make_engine(model, batch_spec):
        return MirroredEngine(task, model, devices, options, batch_spec=batch_spec, shares=shares)

    return SynchronousStrategy("mirrored", task, options, make_engine, devices.num_towers)


class MirroredEngine(Engine):
    """Trains and evaluates batches; each tower is a replica of MirroredStrategy."""

    def __init__(self, *arguments, **named):
        """Arguments as for `Engine`."""
        super().__init__(*arguments, **named)
        self._parts = TowerParts.of_one_process(self.shares)
        self._strategy = tf.distribute.MirroredStrategy(
            list(self.devices.towers), cross_device_ops=_reduction(self.devices.towers)
        )
        with self._strategy.scope():
            self._parameters = variables_like(self.tower.variables.parameters)
            self._state = variables_like(self.tower.variables.state)
            self._slots = make_slots(self.options.rule, self._parameters)
        self._constraints = constraints_of(self.tower.variables)

    def parameters(self) -> Mapping[str, tf.Variable]:
        return self._parameters

    def state(self) -> Mapping[str, tf.Variable]:
        return self._state

    def slots(self) -> Mapping[str, Mapping[str, tf.Variable]]:
        return self._slots

    def first_sums(self, batch):
        """Each replica's own sums over the first microbatch, as PerReplica values."""

        def replica(batch):
            return self._replica_sums(batch, 0, [variable.read_value() for variable in self._state.values()])

        return self._strategy.run(replica, args=(batch,))

    def more_sums(self, batch, microbatch_index, sums):
        def replica(batch, sums):
            result = self._replica_sums(batch, microbatch_index, sums.new_state)
            return add_to(sums, result, gradients.add_each)

        return self._strategy.run(replica, args=(batch, sums))

    def _replica_sums(self, batch, microbatch_index, state) -> TowerResult:
        """This replica's pass over its part of a (micro)batch, with the new state of all replicas."""
        replica = _replica_index()
        own = microbatch(batch, microbatch_index, self.options.accumulation)
        part, activity = self._parts.part(own, replica)
        pass_index = self._parts.pass_index(microbatch_index, replica)
        seed = tower_seed(self.options.seed, self.counters.step.read_value(), pass_index)
        parameters = [variable.read_value() for variable in self._parameters.values()]
        result = self.tower(parameters, state, part, seed, activity * self.counters.loss_scale.read_value())
        return result._replace(new_state=self._combined_state(replica, state, result))

    def _combined_state(self, replica, old_state, own: TowerResult) -> list[tf.Tensor]:
        """After every microbatch, because a part's weight may differ from one microbatch to the next."""
        if not old_state:
            return []
        policy = self.options.batch_stats
        changes = batch_stats.changes(
            old_state, own.new_state, own.weight, is_first=replica == 0, batch_stats=policy
        )
        weight, *summed = _all_reduce(tf.distribute.get_replica_context(), [own.weight, *changes])
        return batch_stats.changed(old_state, summed, weight, policy)

    def apply(self, batch, sums, rate):
        outcomes = self._strategy.run(self._replica_apply, args=(batch, sums, rate))
        # All replicas found the same, so the report of the first is the step's.
        found, mean = tf.nest.map_structure(self._first_of, outcomes)
        with tf.device(HOST):
            count_step(batch_length(batch), mean, self.options, self.counters)
            return found

    def _first_of(self, value):
        return self._strategy.experimental_local_results(value)[0]

    def _replica_apply(self, batch, own, rate):
        context = tf.distribute.get_replica_context()
        scalars = tf.unstack(_all_reduce(context, tf.stack(scalars_of(own))))
        summed = with_scalars(own, scalars)._replace(gradients=_all_reduce(context, own.gradients))
        mean = mean_gradients(summed, self.options, self.counters)
        context.merge_call(self._update, args=(mean, summed.new_state, rate))
        # Only scalars leave the replica; the gradients are used up.
        return outcome(batch_length(batch), batch.features, summed, mean), mean._replace(gradients=[])

    def _update(self, strategy, mean, new_state, rate):
        """In the cross-replica context: each device updates its own copy."""
        is_allowed = may_update(tf.nest.map_structure(self._first_of, mean), self.counters)

        def update_all():
            for (name, variable), gradient in zip(self._parameters.items(), mean.gradients, strict=True):
                slots = {slot: by_name[name] for slot, by_name in self._slots.items()}
                arguments = (name, slots, gradient, rate)
                strategy.extended.update(variable, self._update_one, args=arguments, group=False)
            for variable, value in zip(self._state.values(), new_state, strict=True):
                strategy.extended.update(variable, lambda own, new: own.assign(new), args=(value,), group=False)
            return tf.constant(True)

        tf.cond(is_allowed, update_all, lambda: tf.constant(False))

    def _update_one(self, variable, name, slots, gradient, rate):
        update = self.counters.updates.read_value()
        by_slot = {slot: {name: own} for slot, own in slots.items()}
        apply_rule(self.options.rule, {name: variable}, by_slot, self._constraints, [gradient], rate, update)

    def evaluate_towers(self, batch):
        def replica(batch):
            part, activity = self._parts.part(batch, _replica_index())
            parameters = [variable.read_value() for variable in self._parameters.values()]
            state = [variable.read_value() for variable in self._state.values()]
            return self.evaluation(parameters, state, part, activity)

        results = self._strategy.run(replica, args=(batch,))
        local = [self._strategy.experimental_local_results(value) for value in tf.nest.flatten(results)]
        with tf.device(HOST):
            return add_evaluations(
                [tf.nest.pack_sequence_as(results, of_replica) for of_replica in zip(*local, strict=True)]
            )


def _all_reduce(context, values):
    """Sums over the replicas. Under one replica, TensorFlow's all_reduce fails on values between calls."""
    return values if context.num_replicas_in_sync == 1 else context.all_reduce("sum", values)


def _replica_index() -> int:
    """Index of this replica; known while its graph is traced."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


def _reduction(devices) -> tf.distribute.CrossDeviceOps | None:
    """NCCL for GPUs. On CPUs plain sums: TensorFlow's collectives there serve one MirroredStrategy a process."""
    on_gpus = all("GPU" in device for device in devices)
    return None if on_gpus else tf.distribute.ReductionToOneDevice()
