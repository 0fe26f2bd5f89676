"""Every parameter on one of the towers' devices, large ones in slices on several. Each device updates its own.

slices of CPU:0 --+--> joined on tower 0 -> its gradient, cut --+--> sum, / weight, norm, clip, update on CPU:0
slices of CPU:1 --+--> joined on tower 1 -> its gradient, cut --+--> sum, / weight, norm, clip, update on CPU:1
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import keras
import tensorflow as tf

from towers.devices import HOST
from towers.owners import ManyOwners, Owners, Slices
from towers.packed_copies import PackedCopies, PackedOwners
from towers.parameters.optimizer_bytes import notice_of
from towers.parameters.permission import Permission
from towers.parameters.placement import (
    apply_rule,
    canonical_names,
    constraints_of,
    finish_rule,
    make_slots,
    set_state,
    variables_like,
)
from towers.parameters.shards import Shard, shards_of
from towers.parameters.sliced_variable import SlicedVariable
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


@dataclasses.dataclass(frozen=True)
class OwnedPart:
    """A parameter or a slice of it, with its slots, on its owner's device.

    Attributes:
      shard: the parameter, and which part of it this is.
      device: the owner's device.
      variable: the part.
      slots: its slots by slot name.
    """

    shard: Shard
    device: str
    variable: tf.Variable
    slots: Mapping[str, tf.Variable]

    @property
    def num_bytes(self) -> int:
        """Bytes of the part, without its slots."""
        return self.variable.dtype.size * self.variable.shape.num_elements()


class ShardedPlacement:
    """Implements `towers.parameters.placement.Placement`. The state is small, so the first device has all of it.

    Attributes:
      parts: the parts of all parameters, in order.
      owners: where their gradients meet.
      parameters, state, slots: as `Placement`; sliced ones are `SlicedVariable`.
    """

    def __init__(
        self,
        variables: ModelVariables,
        rule: UpdateRule,
        devices: Sequence[str],
        shards: Sequence[Shard] | None = None,
        copies: PackedCopies | None = None,
    ):
        """Creates variables on `devices` with the template's current values, and slots of zeros beside them.

        Args:
          variables: the model's.
          rule: names the slots.
          devices: the owners.
          shards: shards of all parameters, in order; None for shards of equal size.
          copies: sends the gradients if there is a tower on each of `devices`; None to let TensorFlow send each
            gradient alone.
        """
        self._constraints = constraints_of(variables)
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        if shards is None:
            shards = shards_for(templates, rule, self._constraints, len(devices))
        self._devices = devices
        self.parts = [_owned(shard, templates[shard.name], rule, devices[shard.owner]) for shard in shards]
        self.owners: Owners = owners_of(self.parts, list(templates))
        if copies is not None:
            homes = [part.device for part in self.parts]
            self.owners = PackedOwners(self.owners, copies, devices, homes, home=devices[0])
        self.parameters = by_name(self.parts, [part.variable for part in self.parts], SlicedVariable)
        self.slots = {
            slot: by_name(self.parts, [part.slots[slot] for part in self.parts], SlicedVariable)
            for slot in rule.slot_names
        }
        with tf.device(devices[0]):
            self.state = variables_like(variables.state)

    def read(self):
        values = []
        for part in self.parts:
            with tf.device(part.device):
                values.append(part.variable.read_value())
        parameters = by_name(self.parts, values, Slices)
        return list(parameters.values()), [variable.read_value() for variable in self.state.values()]

    def update(self, is_allowed, means, new_state, *, rule, rate, update):
        def update_all():
            update_parts(rule, self.parts, self._constraints, means, rate, update, is_allowed)
            set_state(self.state, new_state, is_allowed)

        is_allowed.run(update_all)

    def finish(self, is_last, *, rule, updates):
        def finish_all():
            finish_parts(rule, self.parts, self._constraints, updates, is_last)

        is_last.run(finish_all)

    @property
    def notice(self) -> str:
        """A line for the user: how much of the parameters and of the optimizer state each device owns."""
        owned = [sum(part.num_bytes for part in self.parts if part.device == device) for device in self._devices]
        fullest = max(owned) * len(owned) / sum(owned)
        slots: dict[str, list] = {device: [] for device in self._devices}
        for part in self.parts:
            slots[part.device] += part.slots.values()
        return (
            f"parameters are sharded over {len(owned)} devices: {sum(owned):,} bytes, the fullest has "
            f"{max(owned):,}, {fullest:.2f} times the mean; {notice_of(slots)}"
        )


def shards_for(
    templates: Mapping[str, keras.Variable],
    rule: UpdateRule,
    constraints: Collection[str],
    num_owners: int,
    dimensions: Mapping[str, int] | None = None,
) -> list[Shard]:
    """The shards of the parameters; a parameter stays whole if the rule or a constraint needs that.

    `dimensions` as for `shards_of`.
    """
    return shards_of(
        {name: tuple(template.shape) for name, template in templates.items()},
        num_owners,
        item_bytes={name: tf.as_dtype(template.dtype).size for name, template in templates.items()},
        whole=constraints if rule.elementwise else templates,
        dimensions=dimensions,
    )


def part_of(shard: Shard, template: keras.Variable) -> tf.Variable:
    """A variable on the current device with the template's values of a shard."""
    name = shard.name.replace("#", "_")
    # The current device gets only the slice.
    with tf.device(HOST):
        value = tf.convert_to_tensor(template.value)
        if shard.dimension is not None:
            value = value[(slice(None),) * shard.dimension + (slice(shard.begin, shard.end),)]
    if shard.dimension is not None:
        name = f"{name}_{shard.begin}_{shard.end}"
    return tf.Variable(value, name=name, trainable=False)


def _owned(shard: Shard, template: keras.Variable, rule: UpdateRule, device: str) -> OwnedPart:
    """The shard of a parameter with the template's values."""
    with tf.device(device):
        variable = part_of(shard, template)
        slots = make_slots(rule, {shard.name: variable})
    return OwnedPart(shard, device, variable, {slot: own[shard.name] for slot, own in slots.items()})


class Part(Protocol):
    """A parameter or a slice of it, with an owner.

    Attributes:
      shard: the parameter, and which part of it this is.
      device: the owner's device.
    """

    shard: Shard
    device: str


def update_parts(rule, parts: Sequence, constraints, means, rate, update, is_allowed: Permission) -> None:
    """One update of parts (as `OwnedPart`), each on its device; the other arguments as for `apply_rule`."""
    for part, mean in zip(parts, means, strict=True):
        with tf.device(part.device):
            apply_rule(rule, *_by_its_name(part), constraints, [mean], rate, update, is_allowed)


def finish_parts(rule, parts: Sequence, constraints, updates, is_last: Permission) -> None:
    """The rule's `finish` for parts (as `OwnedPart`), each on its device."""
    for part in parts:
        with tf.device(part.device):
            finish_rule(rule, *_by_its_name(part), constraints, updates, is_last)


def _by_its_name(part) -> tuple[Mapping, Mapping]:
    """A part, and its slots, each by the parameter's name."""
    name = part.shard.name
    return {name: part.variable}, {slot: {name: own} for slot, own in part.slots.items()}


def owners_of(parts: Sequence[Part], names: Sequence[str]) -> ManyOwners:
    """Where the gradients of the parts meet. `names` are those of all parameters, in order."""
    slicing = {
        names.index(name): (of_name[0].shard.dimension, [part.shard.end - part.shard.begin for part in of_name])
        for name, of_name in _groups(parts)
        if of_name[0].shard.dimension is not None
    }
    return ManyOwners(
        devices=[part.device for part in parts],
        parameters=[names.index(part.shard.name) for part in parts],
        slicing=slicing,
    )


def _groups(parts: Sequence[Part]) -> list[tuple[str, list[Part]]]:
    """The parts of each parameter, by name."""
    grouped = itertools.groupby(parts, key=lambda part: part.shard.name)
    return [(name, list(of_name)) for name, of_name in grouped]


def by_name(parts: Sequence[Part], of_parts: Sequence, joined: Callable[[list, int], object]) -> dict:
    """For each parameter's name the item of its only part, or `joined(items of its slices, their dimension)`.

    Args:
      parts: the parts of all parameters.
      of_parts: an item for each part.
      joined: makes one item from those of a sliced parameter.
    """
    found, left = {}, iter(of_parts)
    for name, of_name in _groups(parts):
        own, dimension = [next(left) for _ in of_name], of_name[0].shard.dimension
        found[name] = own[0] if dimension is None else joined(own, dimension)
    return found
