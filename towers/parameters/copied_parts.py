"""Placements with equal copies of parameters, or of slices, on several devices: one device updates, or all do."""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from towers.owners import Owners
from towers.packed_copies import UNPACKED, PackedCopies
from towers.parameters.copied_variable import CopiedVariable
from towers.parameters.permission import Permission
from towers.parameters.placement import (
    apply_rule,
    constraints_of,
    finish_rule,
    make_slots,
    set_state,
    variables_like,
)
from towers.parameters.sharded_placement import by_name, part_of
from towers.parameters.shards import Shard
from towers.parameters.sliced_variable import SlicedVariable
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


@dataclasses.dataclass(frozen=True)
class CopiedPart:
    """A parameter or a slice of it, with its copies and slots.

    Attributes:
      shard: the parameter, and which part of it this is.
      device: the owner's device, where its gradient is summed.
      copies: a copy for each device, the owner's first.
      slots: for each device that has slots (and so makes the update), its slots by slot name.
    """

    shard: Shard
    device: str
    copies: Mapping[str, tf.Variable]
    slots: Mapping[str, Mapping[str, tf.Variable]]

    @classmethod
    def of(
        cls,
        shard: Shard,
        template: keras.Variable,
        rule: UpdateRule,
        holders: Sequence[str],
        updating: Sequence[str],
    ) -> "CopiedPart":
        """Creates copies with the template's current values, and slots of zeros.

        Args:
          shard: which part of the template.
          template: the parameter.
          rule: names the slots.
          holders: the devices of the copies, the owner's first.
          updating: the devices with slots.
        """
        copies, slots = {}, {}
        for device in holders:
            with tf.device(device):
                copies[device] = part_of(shard, template)
                if device in updating:
                    of_name = make_slots(rule, {shard.name: copies[device]})
                    slots[device] = {slot: own[shard.name] for slot, own in of_name.items()}
        return cls(shard, holders[0], copies, slots)

    def slot(self, name: str) -> tf.Variable | CopiedVariable:
        """A slot as one variable over all devices that have it."""
        own = [slots[name] for slots in self.slots.values()]
        return own[0] if len(own) == 1 else CopiedVariable(own)

    @property
    def others(self) -> list[str]:
        """The devices whose copies nothing updates: they get the owner's value."""
        return [device for device in self.copies if device not in self.slots]


class PlacementOfCopies:
    """Implements `towers.parameters.placement.Placement` without `read`: what all placements with copies share.

    Attributes:
      parts: the parts of all parameters, in order.
      owners: where their gradients meet.
      parameters, state, slots: as `Placement`; copied and sliced ones are `CopiedVariable` and `SlicedVariable`.
    """

    def __init__(
        self,
        variables: ModelVariables,
        rule: UpdateRule,
        parts: Sequence[CopiedPart],
        owners: Owners,
        devices: Sequence[str],
        copies: PackedCopies = UNPACKED,
    ):
        """Args:
        variables: give the initial values of the state.
        rule: says which slots there are.
        parts, owners: become the attributes.
        devices: the devices with a copy of all state; the first one combines what the towers return.
        copies: sends mean gradients, the owners' new values, and new state.
        """
        self.parts, self.owners, self._copies = parts, owners, copies
        self._constraints = constraints_of(variables)
        self.parameters = self._named([CopiedVariable(part.copies.values()) for part in parts])
        self.slots = {slot: self._named([part.slot(slot) for part in parts]) for slot in rule.slot_names}
        self._state_on: dict[str, dict[str, tf.Variable]] = {}
        for device in devices:
            with tf.device(device):
                self._state_on[device] = variables_like(variables.state)
        first, *others = self._state_on.values()
        self.state = {
            name: CopiedVariable([variable, *(copies[name] for copies in others)]) if others else variable
            for name, variable in first.items()
        }

    def _named(self, of_parts: Sequence) -> dict:
        return by_name(self.parts, of_parts, SlicedVariable)

    def update(self, is_allowed, means, new_state, *, rule, rate, update):
        def update_all():
            homes, updating = zip(*((part.device, part.slots) for part in self.parts), strict=True)
            sent = self._copies.sent(means, homes, updating)
            for part, of_device in zip(self.parts, sent, strict=True):
                for device, mean in of_device.items():
                    with tf.device(device):
                        apply_rule(rule, *self._described(part, device), [mean], rate, update, is_allowed)
            self._set_others()
            self._set_state(new_state, is_allowed)

        is_allowed.run(update_all)

    def finish(self, is_last, *, rule, updates):
        def finish_all():
            for part in self.parts:
                for device in part.slots:
                    with tf.device(device):
                        finish_rule(rule, *self._described(part, device), updates, is_last)
            self._set_others()

        is_last.run(finish_all)

    def _set_state(self, new_state: Mapping[int, tf.Tensor], is_allowed: Permission) -> None:
        devices = list(self._state_on)
        sent = self._copies.sent(
            list(new_state.values()), devices[:1] * len(new_state), [devices] * len(new_state)
        )
        for device, own in self._state_on.items():
            with tf.device(device):
                values = (of_device[device] for of_device in sent)
                set_state(own, dict(zip(new_state, values, strict=True)), is_allowed)

    def _set_others(self) -> None:
        """Sends the owners' values to the copies that nothing has updated."""
        parts = [part for part in self.parts if part.others]
        values = []
        for part in parts:
            with tf.device(part.device):
                values.append(part.copies[part.device].read_value())
        sent = self._copies.sent(values, [part.device for part in parts], [part.others for part in parts])
        for part, of_device in zip(parts, sent, strict=True):
            for device, value in of_device.items():
                with tf.device(device):
                    part.copies[device].assign(value)

    def _described(self, part: CopiedPart, device: str):
        """A part's copy, slots and constraints on a device, each by the parameter's name."""
        name = part.shard.name
        slots = {slot: {name: own} for slot, own in part.slots[device].items()}
        return {name: part.copies[device]}, slots, self._constraints

    def slots_on(self, devices: Sequence[str]) -> dict[str, list]:
        """The slots on each device, for `towers.parameters.optimizer_bytes.notice_of`."""
        found: dict[str, list] = {device: [] for device in devices}
        for part in self.parts:
            for device, own in part.slots.items():
                found[device] += own.values()
        return found
