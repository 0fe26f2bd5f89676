"""A copy of every parameter on each tower's device. Gradients meet at owners, and the copies stay equal.

    tower 0's gradient --+--> sum, / weight, norm, clip on the owner --+--> copy 0
    tower 1's gradient --+                                             +--> copy 1

    slots on every device   the owner sends the mean gradient; every device makes the same update   (replicated)
    slots on the owner      the owner makes the update and sends the new value                      (ZeRO 1, 2)

With ZeRO 1 gradients meet once a step, with ZeRO 2 after each microbatch.

Owners have equal numbers of bytes, for which large parameters are sliced: sums at the owners and the sending back
are a reduce-scatter and an all-gather.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from towers.copied_variable import CopiedVariable
from towers.optimizer_bytes import told
from towers.owners import Copies, LateOwners, Slices
from towers.placement import (
    apply_rule,
    canonical_names,
    constraints_of,
    finish_rule,
    make_slots,
    run_if,
    set_state,
    variables_like,
)
from towers.sharded_placement import by_name, owners_of, part_of, shards_for
from towers.shards import Shard
from towers.sliced_variable import SlicedVariable
from towers.tower import ModelVariables
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


class CopiedPlacement:
    """Implements `towers.placement.Placement`. The state is small, so the first tower's device has all of it.

    Attributes:
      parts: the parts of all parameters, in order.
      owners: where their gradients meet.
      parameters, state, slots: as `Placement`; copied and sliced ones are `CopiedVariable` and `SlicedVariable`.
    """

    def __init__(
        self,
        variables: ModelVariables,
        rule: UpdateRule,
        towers: Sequence[str],
        *,
        owners: Sequence[str] | None = None,
        slots_everywhere: bool = False,
        meet_late: bool = False,
    ):
        """Args:
        variables: give the first values.
        rule: says which slots there are.
        towers: the device of each tower.
        owners: the devices that own parts; None for the towers' devices.
        slots_everywhere: whether every device has all slots and makes every update; otherwise the owners do.
        meet_late: whether gradients are sent to their owners once a step, and not after each microbatch. Each
          tower then keeps the sums of all its gradients.
        """
        self._constraints = constraints_of(variables)
        self._towers = towers
        devices = list(dict.fromkeys(towers))
        owners = devices if owners is None else owners
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        self.parts = []
        for shard in shards_for(templates, rule, self._constraints, len(owners)):
            owner = owners[shard.owner]
            holders = list(dict.fromkeys([owner, *devices]))
            updating = holders if slots_everywhere else [owner]
            self.parts.append(_copied(shard, templates[shard.name], rule, holders, updating))
        meeting = owners_of(self.parts, list(templates))
        self.owners = LateOwners(meeting, towers) if meet_late else meeting
        self.parameters = self._named([CopiedVariable(part.copies.values()) for part in self.parts])
        self.slots = {slot: self._named([_slot(part, slot) for part in self.parts]) for slot in rule.slot_names}
        with tf.device(devices[0]):
            self.state = variables_like(variables.state)

    def _named(self, of_parts: Sequence) -> dict:
        return by_name(self.parts, of_parts, SlicedVariable)

    def read(self):
        of_towers = []
        for device in self._towers:
            with tf.device(device):
                values = [part.copies[device].read_value() for part in self.parts]
            of_towers.append(by_name(self.parts, values, Slices).values())
        parameters = [Copies(values) for values in zip(*of_towers, strict=True)]
        return parameters, [variable.read_value() for variable in self.state.values()]

    def update(self, is_allowed, means, new_state, *, rule, rate, update):
        def update_all():
            for part, mean in zip(self.parts, means, strict=True):
                for device in part.slots:
                    with tf.device(device):
                        apply_rule(rule, *self._described(part, device), [mean], rate, update)
                _send(part)
            set_state(self.state, new_state)

        run_if(is_allowed, update_all)

    def finish(self, is_last, *, rule, updates):
        def finish_all():
            for part in self.parts:
                for device in part.slots:
                    with tf.device(device):
                        finish_rule(rule, *self._described(part, device), updates)
                _send(part)

        run_if(is_last, finish_all)

    def _described(self, part: CopiedPart, device: str):
        """A part's copy, its slots and its constraints by its parameter's name."""
        name = part.shard.name
        slots = {slot: {name: own} for slot, own in part.slots[device].items()}
        return {name: part.copies[device]}, slots, self._constraints

    @property
    def notice(self) -> str:
        """A line for the user: how much optimizer state each device has."""
        slots: dict[str, list] = {device: [] for device in self.parts[0].copies}
        for part in self.parts:
            for device, own in part.slots.items():
                slots[device] += own.values()
        return f"parameters are copied to {len(set(self._towers))} devices; {told(slots)}"


def _copied(
    shard: Shard, template, rule: UpdateRule, holders: Sequence[str], updating: Sequence[str]
) -> CopiedPart:
    copies, slots = {}, {}
    for device in holders:
        with tf.device(device):
            copies[device] = part_of(shard, template)
            if device in updating:
                of_name = make_slots(rule, {shard.name: copies[device]})
                slots[device] = {slot: own[shard.name] for slot, own in of_name.items()}
    return CopiedPart(shard, holders[0], copies, slots)


def _slot(part: CopiedPart, slot: str) -> tf.Variable | CopiedVariable:
    own = [slots[slot] for slots in part.slots.values()]
    return own[0] if len(own) == 1 else CopiedVariable(own)


def _send(part: CopiedPart) -> None:
    """Sends the owner's value to the copies that nothing has updated."""
    value = part.copies[part.device].read_value()
    for device, copy in part.copies.items():
        if device not in part.slots:
            with tf.device(device):
                copy.assign(value)
