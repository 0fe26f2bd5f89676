"""ZeRO 3 over towers of several devices: corresponding devices of the towers share the parameters too.

    data:2,stage:2           tower 0          tower 1
    stage 0's parameters     half on CPU:0    half on CPU:2      with their slots and updates
    stage 1's parameters     half on CPU:1    half on CPU:3

Likewise for slices and branches. A tower gathers on each device what that device uses (`towers.gathering`).
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from towers.owners import Slices
from towers.parameters.held_by_groups import Groups, OwnersOfGroups, held_by_groups
from towers.parameters.placement import canonical_names, constraints_of
from towers.parameters.sharded_placement import ShardedPlacement, by_name
from towers.parameters.shards import Shard
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


class ShardedGroups(ShardedPlacement):
    """Implements `towers.parameters.placement.Placement`. The state is small, so the first device has all of it.

    Attributes as `ShardedPlacement`.
    """

    def __init__(self, variables: ModelVariables, rule: UpdateRule, groups: Groups, shards: Sequence[Shard]):
        """Creates variables with the template's current values, and slots of zeros on the same devices.

        Args:
          variables: the model's.
          rule: names the slots.
          groups: the devices of each tower.
          shards: shards of all parameters, in order; the owner of each is the index of a device in its tower.
        """
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        whole = constraints_of(variables) if rule.elementwise else templates
        self._held = held_by_groups(shards, templates, whole, groups)
        size = len(groups[0])
        super().__init__(
            variables,
            rule,
            [device for group in groups for device in group],
            [
                dataclasses.replace(cut, owner=cut.owner * size + held.shard.owner)
                for held in self._held
                for cut in held.cuts
            ],
        )
        # Gradients are sent after each microbatch: a tower has no memory for the sums of all gradients.
        self.owners = OwnersOfGroups(self.owners, self._held, groups, meet_late=False)

    def read(self):
        """As `Placement.read`. The value that a tower's device uses may be `Slices`, also nested in `Slices`."""
        parts, values = iter(self.parts), []
        for held in self._held:
            own = []
            for _ in held.cuts:
                part = next(parts)
                with tf.device(part.device):
                    own.append(part.variable.read_value())
            values.append(own[0] if len(own) == 1 else Slices(own, held.dimension))
        parameters = by_name(self._held, values, Slices)
        return list(parameters.values()), [variable.read_value() for variable in self.state.values()]
