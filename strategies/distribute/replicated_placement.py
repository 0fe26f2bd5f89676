"""Parameters, state and slots as variables of a tf.distribute strategy: each replica has a copy and updates it."""

import functools

import tensorflow as tf

from towers.errors import UserError
from towers.owners import CURRENT_DEVICE
from towers.parameters.permission import Permission
from towers.parameters.placement import apply_rule, constraints_of, finish_rule, make_slots, variables_like
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule

# Dtypes of `CollectiveBcastSend`, by which worker 0 sends the others its initial values.
_SENT = (tf.bool, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def check_sent(variables: ModelVariables) -> None:
    """Raises UserError for variables of a dtype that TensorFlow's collectives can't send to other workers."""
    named = [
        f"{variable.path} in {variable.dtype}"
        for variable in (*variables.parameters, *variables.state)
        if tf.as_dtype(variable.dtype) not in _SENT
    ]
    if named:
        raise UserError(
            f"{', '.join(named[:3])}{' and others' if named[3:] else ''}: TensorFlow's collectives can't send "
            "such values to other workers; use engine='own'"
        )


class ReplicatedPlacement:
    """Implements `towers.parameters.placement.Placement`; `read` and `update` are called inside `strategy.run`."""

    owners = CURRENT_DEVICE

    def __init__(self, strategy: tf.distribute.Strategy, variables: ModelVariables, rule: UpdateRule):
        """Creates variables with the template's current values (of worker 0), and slots of zeros."""
        self._strategy = strategy
        with strategy.scope():
            self.parameters = variables_like(variables.parameters)
            self.state = variables_like(variables.state)
            self.slots = make_slots(rule, self.parameters)
        self._constraints = constraints_of(variables)

    def read(self):
        parameters = [variable.read_value() for variable in self.parameters.values()]
        return parameters, [variable.read_value() for variable in self.state.values()]

    def update(self, is_allowed, means, new_state, *, rule, rate, update):
        context = tf.distribute.get_replica_context()
        update_all = functools.partial(self._update_all, masked=is_allowed.masked)
        context.merge_call(update_all, args=(is_allowed.flag, means, new_state, rule, rate, update))

    def _update_all(self, strategy, flag, means, new_state, rule, rate, update, *, masked: bool):
        """Updates all in the cross-replica context. The condition is outside the updates, which are per device."""

        def update_all():
            for (name, variable), mean in zip(self.parameters.items(), means, strict=True):
                slots = {slot: by_name[name] for slot, by_name in self.slots.items()}
                arguments = (name, slots, mean, rule, rate, update, flag, masked)
                strategy.extended.update(variable, self._update_one, args=arguments, group=False)
            state = list(self.state.values())
            for index, value in new_state.items():
                strategy.extended.update(state[index], _assign, args=(value, flag, masked), group=False)

        # The flag is the same on all replicas, which computed it from the same sums.
        of_first = strategy.experimental_local_results(flag)[0]
        Permission(of_first, masked).run(update_all)

    def finish(self, is_last, *, rule, updates):
        """Called in the cross-replica context, outside `strategy.run`."""

        def finish_all():
            for name, variable in self.parameters.items():
                slots = {slot: by_name[name] for slot, by_name in self.slots.items()}
                arguments = (name, slots, rule, updates, is_last.flag, is_last.masked)
                self._strategy.extended.update(variable, self._finish_one, args=arguments, group=False)

        with self._strategy.scope():
            is_last.run(finish_all)

    def _finish_one(self, variable, name, slots, rule, updates, flag, masked):
        by_slot = {slot: {name: own} for slot, own in slots.items()}
        is_last = Permission(flag, masked)
        finish_rule(rule, {name: variable}, by_slot, self._constraints, updates, is_last)

    def _update_one(self, variable, name, slots, mean, rule, rate, update, flag, masked):
        by_slot = {slot: {name: own} for slot, own in slots.items()}
        is_allowed = Permission(flag, masked)
        apply_rule(rule, {name: variable}, by_slot, self._constraints, [mean], rate, update, is_allowed)


def _assign(variable, value, flag, masked):
    Permission(flag, masked).assign(variable, value)
