"""Parameters, or slices of them, with equal copies on several devices: one device makes an update, or all do."""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from towers.parameters.copied_variable import CopiedVariable
from towers.parameters.placement import apply_rule, finish_rule, make_slots
from towers.parameters.sharded_placement import by_name, part_of
from towers.parameters.shards import Shard
from towers.parameters.sliced_variable import SlicedVariable
from towers.updates.rules import UpdateRule


@dataclasses.dataclass(frozen=True)
class CopiedPart:
    """A parameter or a slice of it, with its copies and slots.

    Attributes:
      shard: which part of which parameter it is.
      device: the owner's device, where its gradient is summed.
      copies: a copy for each device, the owner's first.
      slots: by each device that has them (and so makes the update) the slots by slot name.
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
        """Copies with the template's present values, and slots of zeros.

        Args:
          shard: which part of the template.
          template: the parameter.
          rule: names the slots.
          holders: the devices of the copies, the owner's first.
          updating: those that have the slots.
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
        """A slot on all devices that have it."""
        own = [slots[name] for slots in self.slots.values()]
        return own[0] if len(own) == 1 else CopiedVariable(own)

    def send(self) -> None:
        """Sends the owner's value to the copies that nothing has updated."""
        value = self.copies[self.device].read_value()
        for device, copy in self.copies.items():
            if device not in self.slots:
                with tf.device(device):
                    copy.assign(value)


@dataclasses.dataclass(frozen=True)
class CopiedParts:
    """The parts of all parameters.

    Attributes:
      parts: in the order of the parameters.
      constraints: Keras's, by canonical name.
    """

    parts: Sequence[CopiedPart]
    constraints: Mapping[str, object]

    def parameters(self) -> dict:
        """By canonical name; copied and sliced ones are `CopiedVariable` and `SlicedVariable`."""
        return self._named([CopiedVariable(part.copies.values()) for part in self.parts])

    def slots(self, rule: UpdateRule) -> dict[str, dict]:
        """By slot name and canonical name."""
        return {slot: self._named([part.slot(slot) for part in self.parts]) for slot in rule.slot_names}

    def _named(self, of_parts: Sequence) -> dict:
        return by_name(self.parts, of_parts, SlicedVariable)

    def apply(self, rule: UpdateRule, means: Sequence, rate: tf.Tensor, update: tf.Tensor) -> None:
        """One update of all parts from their mean gradients; arguments as for `Placement.update`."""
        for part, mean in zip(self.parts, means, strict=True):
            for device in part.slots:
                with tf.device(device):
                    apply_rule(rule, *self._described(part, device), [mean], rate, update)
            part.send()

    def finish(self, rule: UpdateRule, updates: tf.Tensor) -> None:
        """The rule's `finish` for all parts; arguments as for `Placement.finish`."""
        for part in self.parts:
            for device in part.slots:
                with tf.device(device):
                    finish_rule(rule, *self._described(part, device), updates)
            part.send()

    def _described(self, part: CopiedPart, device: str):
        """A part's copy, its slots and its constraints by its parameter's name."""
        name = part.shard.name
        slots = {slot: {name: own} for slot, own in part.slots[device].items()}
        return {name: part.copies[device]}, slots, self.constraints

    def slots_on(self, devices: Sequence[str]) -> dict[str, list]:
        """The slots of each device, for `towers.parameters.optimizer_bytes.told`."""
        found: dict[str, list] = {device: [] for device in devices}
        for part in self.parts:
            for device, own in part.slots.items():
                found[device] += own.values()
        return found
