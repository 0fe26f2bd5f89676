"""Where parameters, state and slots live, and so where gradients are summed and updates run; a class per policy.

These are the only variables of a run. The Keras model is a template: it gives the structure, the names and the
initial values.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import keras
import tensorflow as tf

from towers import gradients
from towers.layers.table_rows import TableRows
from towers.owners import CURRENT_DEVICE, Copies, Owners, Slices
from towers.parameters.compiled_update import can_compile, update_compiled
from towers.parameters.permission import Permission
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule
from towers.updates.sparse_updates import only_rows


def canonical_names(variables: Sequence[keras.Variable]) -> list[str]:
    """One name for each variable, the same in every mode: its Keras path; a repeated path gets '#2', '#3', ..."""
    seen = collections.Counter()
    names = []
    for variable in variables:
        seen[variable.path] += 1
        names.append(variable.path if seen[variable.path] == 1 else f"{variable.path}#{seen[variable.path]}")
    return names


class Placement(Protocol):
    """A policy of placement.

    Attributes:
      owners: where the gradients of its parameters, or of slices of them, meet.
      parameters, state: by canonical name, in the model's order.
      slots: by slot name and canonical name.
    """

    owners: Owners
    parameters: Mapping[str, tf.Variable]
    state: Mapping[str, tf.Variable]
    slots: Mapping[str, Mapping[str, tf.Variable]]

    def read(self) -> tuple[list[tf.Tensor | TableRows | Slices | Copies], list[tf.Tensor | Copies]]:
        """Parameters and state as tensors, read once a step."""

    def update(
        self,
        is_allowed: Permission,
        means: Sequence[gradients.Gradient],
        new_state: Mapping[int, tf.Tensor],
        *,
        rule: UpdateRule,
        rate: tf.Tensor,
        update: tf.Tensor,
    ) -> None:
        """Applies the rule to every parameter and sets the state, or changes nothing.

        Args:
          is_allowed: whether to do it.
          means: mean gradients, one for each part that an owner has: for each parameter, or each slice.
          new_state: by index in the state, the variables that change.
          rule: computes the update.
          rate: float32 scalar, learning rate.
          update: int64 scalar, number of updates before this one.
        """

    def finish(self, is_last: Permission, *, rule: UpdateRule, updates: tf.Tensor) -> None:
        """Runs the rule's `finish` on every parameter if `is_last`. Called after each step if the rule needs it.

        Args:
          is_last: true only if this was the run's last step.
          rule: has a `num_steps`.
          updates: int64 scalar, number of updates of the run.
        """


@dataclasses.dataclass(frozen=True)
class CentralPlacement:
    """Everything on one device, CPU or GPU. Each step sends every tower a copy."""

    device: str
    parameters: Mapping[str, tf.Variable]
    state: Mapping[str, tf.Variable]
    slots: Mapping[str, Mapping[str, tf.Variable]]
    constraints: Mapping[str, object]
    owners: Owners = CURRENT_DEVICE
    compiled: bool = False

    @classmethod
    def of(
        cls,
        variables: ModelVariables,
        rule: UpdateRule,
        device: str,
        owners: Owners = CURRENT_DEVICE,
        *,
        compiled: bool = False,
    ) -> "CentralPlacement":
        """Creates variables on `device` with the template's current values, and slots of zeros.

        Args:
          variables: the model's.
          rule: names the slots.
          device: the device of the variables and slots.
          owners: where gradients meet, on `device`; the default is the sum over the towers of this process.
          compiled: whether XLA compiles mean and update where it can. Requires masks (`Permission`).
        """
        with tf.device(device):
            parameters = variables_like(variables.parameters)
            state = variables_like(variables.state)
            slots = make_slots(rule, parameters)
        return cls(device, parameters, state, slots, constraints_of(variables), owners, compiled)

    def read(self, rows: Mapping[str, tf.Tensor] | None = None):
        """As `Placement.read`.

        Args:
          rows: for some tables, by canonical name, the rows to read: int64 [n], ascending, each once. A table that
            a step reads whole is copied before its update.
        """
        rows = rows or {}
        with tf.device(self.device):
            values = [
                TableRows(rows[name], tf.gather(variable, rows[name])) if name in rows else variable.read_value()
                for name, variable in self.parameters.items()
            ]
            return values, [variable.read_value() for variable in self.state.values()]

    def compiles(self, rule: UpdateRule, means: Sequence[gradients.Gradient]) -> bool:
        """Whether XLA compiles the update by such gradients; only their types matter."""
        return self.compiled and not self.constraints and can_compile(rule, self.parameters, means)

    def update(self, is_allowed, means, new_state, *, rule, rate, update):
        if self.compiles(rule, means):
            described = rule, self.parameters, self.slots, self.state
            with tf.device(self.device):
                update_compiled(*described, means, new_state, rate, update, is_allowed.flag)
            return

        def update_all():
            with tf.device(self.device):
                described = self.parameters, self.slots, self.constraints
                apply_rule(rule, *described, means, rate, update, is_allowed)
            set_state(self.state, new_state, is_allowed)

        is_allowed.run(update_all)

    def finish(self, is_last, *, rule, updates):
        def finish_all():
            with tf.device(self.device):
                finish_rule(rule, self.parameters, self.slots, self.constraints, updates, is_last)

        is_last.run(finish_all)


def variables_like(templates: Sequence[keras.Variable]) -> dict[str, tf.Variable]:
    """New variables with the templates' values, by canonical name, on the current device."""
    return {
        name: tf.Variable(tf.convert_to_tensor(template.value), name=name.replace("#", "_"), trainable=False)
        for name, template in zip(canonical_names(templates), templates, strict=True)
    }


def free_templates(templates: Sequence[keras.Variable]) -> None:
    """Frees the memory of the templates' values. Reading one is an error afterwards."""
    for template in templates:
        tf.raw_ops.DestroyResourceOp(resource=template.value.handle)


def make_slots(rule: UpdateRule, parameters: Mapping[str, tf.Variable]) -> dict[str, dict[str, tf.Variable]]:
    """Slots of zeros, by slot name and canonical name, on the current device."""
    return {
        slot: {name: tf.Variable(tf.zeros_like(value), trainable=False) for name, value in parameters.items()}
        for slot in rule.slot_names
    }


def constraints_of(variables: ModelVariables) -> dict[str, object]:
    """The Keras constraints (non-negative weights, unit norms) of those parameters that have one, by name."""
    names = canonical_names(variables.parameters)
    found = {name: variable.constraint for name, variable in zip(names, variables.parameters, strict=True)}
    return {name: constraint for name, constraint in found.items() if constraint is not None}


def set_state(state: Mapping[str, tf.Variable], new: Mapping[int, tf.Tensor], is_allowed: Permission) -> None:
    """Assigns the new values, by index, to variables of the state, on their devices."""
    variables = list(state.values())
    for index, value in new.items():
        with tf.device(variables[index].device):  # for the mask too, which would be on the first GPU
            is_allowed.assign(variables[index], value)


def apply_rule(rule, parameters, slots, constraints, means, rate, update, is_allowed: Permission) -> None:
    """One update of all parameters. As in Keras, a constraint is applied after its parameter's update."""
    done: list = []
    for (name, variable), mean in zip(parameters.items(), means, strict=True):
        own = _slots_of(name, slots)

        def act(name=name, variable=variable, own=own, mean=mean):
            rule.apply(name, variable, own, mean, rate, update)
            _constrain(name, variable, constraints)

        # One after another, so that only one parameter's old values take memory at a time.
        with tf.control_dependencies(done):
            if _names_its_rows(rule, name, mean, constraints):
                done = is_allowed.change_rows(variable, mean.indices, act)
            else:
                done = is_allowed.change([variable, *own.values()], act)


def _names_its_rows(rule, name: str, mean: gradients.Gradient, constraints) -> bool:
    """Whether an update changes only rows that the gradient names; False if a custom rule does not tell."""
    is_known = getattr(rule, "elementwise", False) and hasattr(rule, "weight_decay")
    return isinstance(mean, tf.IndexedSlices) and is_known and only_rows(rule) and name not in constraints


def finish_rule(rule, parameters, slots, constraints, updates, is_last: Permission) -> None:
    """The rule's `finish` for all parameters, and their constraints."""
    for name, variable in parameters.items():
        own = _slots_of(name, slots)

        def act(name=name, variable=variable, own=own):
            rule.finish(name, variable, own, updates)
            _constrain(name, variable, constraints)

        is_last.change([variable, *own.values()], act)


def _slots_of(name, slots):
    return {slot: by_name[name] for slot, by_name in slots.items()}


def _constrain(name, variable, constraints) -> None:
    if name in constraints:
        variable.assign(constraints[name](variable.read_value()))
