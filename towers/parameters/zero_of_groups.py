"""ZeRO 1 and 2 over towers of several devices: corresponding devices of the towers share their optimizer state.

    data:2,stage:2           tower 0          tower 1
    stage 0's parameters     copy on CPU:0    copy on CPU:2      half of their slots and updates on each
    stage 1's parameters     copy on CPU:1    copy on CPU:3      half of their slots and updates on each

Likewise for slices and branches. Gradients meet at the owners of their parts, and new values go back to the
copies: a reduce-scatter and an all-gather over corresponding devices. Nothing else leaves a tower's device.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.owners import Copies, Slices
from towers.parameters.copied_parts import CopiedPart, PlacementOfCopies
from towers.parameters.held_by_groups import Groups, Held, OwnersOfGroups, held_by_groups
from towers.parameters.optimizer_bytes import notice_of
from towers.parameters.placement import canonical_names, constraints_of
from towers.parameters.sharded_placement import by_name, owners_of
from towers.parameters.shards import Shard
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


class ZeroOfGroups(PlacementOfCopies):
    """Implements `towers.parameters.placement.Placement`. The state is small, so the first device has all of it.

    Attributes as `PlacementOfCopies`.
    """

    def __init__(
        self,
        variables: ModelVariables,
        rule: UpdateRule,
        groups: Groups,
        shards: Sequence[Shard],
        *,
        meet_late: bool,
    ):
        """Creates variables with the template's current values, and slots of zeros.

        Args:
          variables: the model's.
          rule: names the slots.
          groups: the devices of each tower.
          shards: shards of all parameters, in order; the owner of each is the index of a device in its tower.
          meet_late: whether gradients are sent to their owners once a step (ZeRO 1), which makes each tower keep
            the sums of all its gradients, and not after each microbatch (ZeRO 2).
        """
        self._groups = groups
        constraints = constraints_of(variables)
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        whole = constraints if rule.elementwise else templates
        self._held = held_by_groups(shards, templates, whole, groups)
        self._parts_of = [_parts(held, templates[held.shard.name], rule, groups) for held in self._held]
        parts = [part for of_one in self._parts_of for part in of_one]
        owners = OwnersOfGroups(owners_of(parts, list(templates)), self._held, groups, meet_late)
        super().__init__(variables, rule, parts, owners, devices=groups[0][:1])

    def read(self):
        of_towers = []
        for group in self._groups:
            values = [
                _copy(held, parts, group[held.shard.owner])
                for held, parts in zip(self._held, self._parts_of, strict=True)
            ]
            of_towers.append(by_name(self._held, values, Slices).values())
        parameters = [Copies(values) for values in zip(*of_towers, strict=True)]
        return parameters, [variable.read_value() for variable in self.state.values()]

    @property
    def notice(self) -> str:
        """A line for the user: how much optimizer state each device has."""
        devices = [device for group in self._groups for device in group]
        slots = self.slots_on(devices)
        return f"{len(self._groups)} towers divide their optimizer state, device by device; {notice_of(slots)}"


def _parts(held: Held, template: keras.Variable, rule: UpdateRule, groups: Groups) -> list[CopiedPart]:
    """The parts of a parameter, or of a slice of it, with a copy for each tower, and slots at their owners."""
    counterparts = [group[held.shard.owner] for group in groups]
    found = []
    for cut in held.cuts:
        owner = counterparts[cut.owner]
        holders = list(dict.fromkeys([owner, *counterparts]))
        found.append(CopiedPart.of(cut, template, rule, holders, [owner]))
    return found


def _copy(held: Held, parts: Sequence[CopiedPart], device: str) -> tf.Tensor:
    """The whole copy on a device."""
    with tf.device(device):
        values = [part.copies[device].read_value() for part in parts]
        return values[0] if len(values) == 1 else tf.concat(values, held.dimension)
