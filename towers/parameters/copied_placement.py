"""A copy of every parameter on each tower's device. Gradients meet at owners, and the copies stay equal.

    tower 0's gradient --+--> sum, / weight, norm, clip on the owner --+--> copy 0
    tower 1's gradient --+                                             +--> copy 1

    slots on every device   the owner sends the mean gradient; every device makes the same update   (replicated)
    slots on the owner      the owner makes the update and sends the new value                      (ZeRO 1, 2)

With ZeRO 1 gradients are summed at the owners once a step, with ZeRO 2 after each microbatch.

Large parameters are sliced so that all owners own about the same number of bytes: the sums at the owners are a
reduce-scatter, sending the values back is an all-gather.

State is copied to every tower's device too. The first device combines what the towers return, and sends what
changes; frozen weights are never sent.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.owners import Copies, LateOwners, Slices
from towers.packed_copies import UNPACKED, PackedCopies, PackedOwners
from towers.parameters.copied_parts import CopiedPart, PlacementOfCopies
from towers.parameters.optimizer_bytes import notice_of
from towers.parameters.placement import canonical_names, constraints_of
from towers.parameters.sharded_placement import by_name, owners_of, shards_for
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


class CopiedPlacement(PlacementOfCopies):
    """Implements `towers.parameters.placement.Placement`.

    Attributes as `PlacementOfCopies`.
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
        copies: PackedCopies = UNPACKED,
    ):
        """Args:
        variables: give the initial values.
        rule: says which slots there are.
        towers: the device of each tower.
        owners: the devices that own parts; None for the towers' devices.
        slots_everywhere: whether every device has all slots and makes every update; otherwise the owners do.
        meet_late: whether gradients are sent to their owners once a step, and not after each microbatch. Each
          tower then keeps the sums of all its gradients.
        copies: sends gradients to their owners, and mean gradients or new values back.
        """
        constraints = constraints_of(variables)
        self._towers = towers
        devices = list(dict.fromkeys(towers))
        owners = devices if owners is None else owners
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        parts = []
        for shard in shards_for(templates, rule, constraints, len(owners)):
            owner = owners[shard.owner]
            holders = list(dict.fromkeys([owner, *devices]))
            updating = holders if slots_everywhere else [owner]
            parts.append(CopiedPart.of(shard, templates[shard.name], rule, holders, updating))
        homes = [part.device for part in parts]
        meeting = PackedOwners(owners_of(parts, list(templates)), copies, towers, homes, home=devices[0])
        late = LateOwners(meeting, towers) if meet_late else meeting
        super().__init__(variables, rule, parts, late, devices, copies)

    def read(self):
        of_towers, states = [], []
        for device in self._towers:
            with tf.device(device):
                values = [part.copies[device].read_value() for part in self.parts]
                states.append([variable.read_value() for variable in self._state_on[device].values()])
            of_towers.append(by_name(self.parts, values, Slices).values())
        parameters, state = (
            [Copies(values) for values in zip(*kind, strict=True)] for kind in (of_towers, states)
        )
        return parameters, state

    @property
    def notice(self) -> str:
        """A line for the user: how much optimizer state each device has."""
        slots = self.slots_on(list(self.parts[0].copies))
        return f"parameters are copied to {len(set(self._towers))} devices; {notice_of(slots)}"
