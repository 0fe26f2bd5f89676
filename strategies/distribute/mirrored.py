"""tf.distribute.MirroredStrategy around the same tower function: the comparison that users know.

Every device holds a copy of parameters, state and slots; gradients meet by all-reduce; every copy is updated.
"""

from collections.abc import Mapping

import tensorflow as tf

from strategies.synchronous import SynchronousStrategy
from towers import gradients, step_end
from towers.devices import Devices
from towers.engine import StepEngine
from towers.options import StepOptions
from towers.placement import apply_rule, constraints_of, make_slots, variables_like
from towers.task import Task, WeightedValue, batch_length
from towers.tower import TowerResult


def mirrored_strategy(
    task: Task, devices: Devices, options: StepOptions, *, shares: tuple[float, ...] | None = None
) -> SynchronousStrategy:
    """The strategy 'mirrored'. Parameters live on every tower's device, whatever `devices.parameters` says.

    Raises:
      UserError: shares that don't match the towers, or a batch too small for all of them.
    """

    def make_engine(model, batch_spec):
        return MirroredEngine(task, model, devices, options, batch_spec=batch_spec, shares=shares)

    return SynchronousStrategy("mirrored", task, options, make_engine, devices.num_towers)


class MirroredEngine(StepEngine):
    """As `towers.towers_engine.TowersEngine`, each tower a replica of MirroredStrategy."""

    def make_variables(self) -> None:
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

    def gather_first(self, batch):
        """Every replica's own sums over the first microbatch: PerReplica values."""

        def replica(batch):
            own = step_end.microbatch(batch, 0, self.options.accumulation)
            return self._gather(own, 0, [variable.read_value() for variable in self._state.values()])

        return self._strategy.run(replica, args=(batch,))

    def gather_more(self, batch, micro, sums):
        def replica(batch, sums):
            own = step_end.microbatch(batch, micro, self.options.accumulation)
            result = self._gather(own, micro, sums.new_state)
            return step_end.add_results([sums, result], _sum_here)._replace(new_state=result.new_state)

        return self._strategy.run(replica, args=(batch, sums))

    def _gather(self, batch, micro, state) -> TowerResult:
        """This replica's pass over its part of a (micro)batch; the new state is of all replicas."""
        place = _replica_place()
        part, busy = step_end.part(batch, place, self.shares)
        seed = step_end.tower_seed(
            self.options.seed, self.counters.step.read_value(), micro * len(self.shares) + place
        )
        parameters = [variable.read_value() for variable in self._parameters.values()]
        own = self.tower(parameters, state, part, seed, busy * self.counters.loss_scale.read_value())
        return own._replace(new_state=self._combined_state(place, state, own))

    def _combined_state(self, place, old_state, own: TowerResult) -> list[tf.Tensor]:
        """As `combine_state`: after every microbatch, since a part's weight may be another in each."""
        if not old_state:
            return []
        policy = self.options.batch_stats
        changes = step_end.changes_of_state(old_state, own, first=place == 0, batch_stats=policy)
        summed = _all_reduce(tf.distribute.get_replica_context(), changes)
        return step_end.changed_state(old_state, summed, policy)

    def apply(self, batch, sums, rate):
        outcomes = self._strategy.run(self._replica_apply, args=(batch, sums, rate))
        # Every replica found the same: the first one's report is the step's.
        outcome, mean = tf.nest.map_structure(self._first_of, outcomes)
        with tf.device(step_end.HOST):
            step_end.count_step(batch_length(batch), mean, self.options, self.counters)
            return outcome

    def _first_of(self, value):
        return self._strategy.experimental_local_results(value)[0]

    def _replica_apply(self, batch, own, rate):
        context = tf.distribute.get_replica_context()
        sums = self._reduced(context, own)
        mean = step_end.mean_gradients(sums, self.options, self.counters)
        context.merge_call(self._update, args=(mean, sums.new_state, rate))
        # The gradients themselves have done their work: only scalars leave the replica.
        return step_end.outcome(batch_length(batch), batch.features, sums, mean), mean._replace(gradients=[])

    def _reduced(self, context, own: TowerResult) -> TowerResult:
        """The sums over all replicas, on each of them."""
        scalars = [own.loss_sum, own.weight, *(part for value in own.metric_sums.values() for part in value)]
        loss_sum, weight, *metrics = tf.unstack(_all_reduce(context, tf.stack(scalars)))
        pairs = zip(metrics[::2], metrics[1::2], strict=True)
        return TowerResult(
            loss_sum,
            weight,
            _all_reduce(context, own.gradients),
            own.new_state,
            dict(zip(own.metric_sums, (WeightedValue(*pair) for pair in pairs), strict=True)),
        )

    def _update(self, strategy, mean, new_state, rate):
        """In the cross-replica context: each device updates its own copy."""
        may_update = step_end.may_update(tf.nest.map_structure(self._first_of, mean), self.counters)

        def update_all():
            for (name, variable), gradient in zip(self._parameters.items(), mean.gradients, strict=True):
                slots = {slot: by_name[name] for slot, by_name in self._slots.items()}
                arguments = (name, slots, gradient, rate)
                strategy.extended.update(variable, self._update_one, args=arguments, group=False)
            for variable, value in zip(self._state.values(), new_state, strict=True):
                strategy.extended.update(variable, lambda own, new: own.assign(new), args=(value,), group=False)
            return tf.constant(True)

        tf.cond(may_update, update_all, lambda: tf.constant(False))

    def _update_one(self, variable, name, slots, gradient, rate):
        update = self.counters.updates.read_value()
        by_slot = {slot: {name: own} for slot, own in slots.items()}
        apply_rule(self.options.rule, {name: variable}, by_slot, self._constraints, [gradient], rate, update)

    def evaluate_towers(self, batch):
        def replica(batch):
            part, busy = step_end.part(batch, _replica_place(), self.shares)
            parameters = [variable.read_value() for variable in self._parameters.values()]
            state = [variable.read_value() for variable in self._state.values()]
            return self.evaluation(parameters, state, part, busy)

        results = self._strategy.run(replica, args=(batch,))
        local = [self._strategy.experimental_local_results(value) for value in tf.nest.flatten(results)]
        with tf.device(step_end.HOST):
            return step_end.add_evaluations(
                [tf.nest.pack_sequence_as(results, of_one) for of_one in zip(*local, strict=True)]
            )


def _all_reduce(context, values):
    """Sums over the replicas. One alone has its sum; all_reduce finds no device for what it kept between calls."""
    return values if context.num_replicas_in_sync == 1 else context.all_reduce("sum", values)


def _replica_place() -> int:
    """Which replica this is, from 0; known while its graph is traced."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


def _reduction(devices) -> tf.distribute.CrossDeviceOps | None:
    """NCCL for GPUs; on CPUs plain sums: TensorFlow's collectives there serve one MirroredStrategy a process."""
    on_gpus = all("GPU" in device for device in devices)
    return None if on_gpus else tf.distribute.ReductionToOneDevice()


def _sum_here(per_microbatch):
    return [gradients.add(of_one) for of_one in zip(*per_microbatch, strict=True)]
