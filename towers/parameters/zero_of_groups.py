"""ZeRO 1 and 2 over towers of several devices: counterparts of the towers share their optimizer state.

    data:2,stage:2           tower 0          tower 1
    stage 0's parameters     copy on CPU:0    copy on CPU:2      half of their slots and updates on each
    stage 1's parameters     copy on CPU:1    copy on CPU:3      half of their slots and updates on each

Likewise for slices and branches. Gradients meet at the owners of their parts, new values go back to the copies: a
reduce-scatter and an all-gather over the counterparts. What is on a device of a tower stays there otherwise.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import keras
import tensorflow as tf

from towers import gradients
from towers.gradients import Gradient
from towers.owners import Copies, MetAtOwners, Slices, parts_of
from towers.parameters.copied_parts import CopiedPart, PlacementOfCopies
from towers.parameters.optimizer_bytes import told
from towers.parameters.placement import canonical_names, constraints_of
from towers.parameters.sharded_placement import by_name, owners_of
from towers.parameters.shards import Shard, shards_of
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule

Groups = Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter, or a slice of it, as one device of every tower holds it.

    Attributes:
      shard: which part of which parameter; its owner is the index of the device in each tower.
      parts: its parts, each owned by one of the towers' devices, with a copy on all of them.
      dimension: dimension along which the parts follow each other.
    """

    shard: Shard
    parts: Sequence[CopiedPart]
    dimension: int

    @property
    def lengths(self) -> list[int]:
        """Lengths of the parts in `dimension`."""
        return [part.shard.end - part.shard.begin for part in self.parts]

    def read(self, device: str) -> tf.Tensor:
        """The copy on a device, whole."""
        with tf.device(device):
            values = [part.copies[device].read_value() for part in self.parts]
            return values[0] if len(values) == 1 else tf.concat(values, self.dimension)

    def cut(self, gradient: Gradient, device: str) -> list[Gradient]:
        """The parts of its gradient, cut on the device that computed it."""
        with tf.device(device):
            return [gradient] if len(self.parts) == 1 else parts_of(gradient, self.dimension, self.lengths)


@dataclasses.dataclass(frozen=True)
class OwnersOfGroups(MetAtOwners):
    """Implements `towers.owners.Owners` for towers of several devices.

    Attributes:
      owners: where the gradients of the parts meet.
      held: what each tower holds, in the order of its gradients.
      groups: the devices of each tower.
      meet_late: whether they meet once a step, and not after each microbatch.
    """

    held: Sequence[Held]
    groups: Groups
    meet_late: bool

    def cut(self, of_tower):
        """The gradients of what is held, still whole: a tower's devices cut them when it is known which tower."""
        found: list[Gradient] = []
        for gradient in of_tower:
            found += gradient.parts if isinstance(gradient, Slices) else [gradient]
        return found

    def keep(self, per_tower):
        kept = [gradient for of_tower in per_tower for gradient in of_tower]
        return kept if self.meet_late else self._met(kept)

    def add(self, kept):
        if not self.meet_late:
            return self.owners.add(kept)
        devices = [device for device, _ in self._homes()]
        found = []
        for device, of_one in zip(devices, zip(*kept, strict=True), strict=True):
            with tf.device(device):
                found.append(gradients.add(of_one))
        return found

    def meet(self, kept):
        return self._met(kept) if self.meet_late else list(kept)

    def _met(self, kept: Sequence[Gradient]) -> list[Gradient]:
        """For each part the sum over the towers, on its owner."""
        per_tower: list[list[Gradient]] = [[] for _ in self.groups]
        size = len(self.held)
        for index, ((device, held), gradient) in enumerate(zip(self._homes(), kept, strict=True)):
            per_tower[index // size] += held.cut(gradient, device)
        return self.owners.add(per_tower)

    def _homes(self) -> list[tuple[str, Held]]:
        """What is held and its device, tower by tower."""
        return [(group[held.shard.owner], held) for group in self.groups for held in self.held]


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
        """Variables with the template's present values, and slots of zeros.

        Args:
          variables: the model's.
          rule: names the slots.
          groups: the devices of each tower.
          shards: of all parameters, in order; the owner of each is the index of a device in its tower.
          meet_late: whether gradients are sent to their owners once a step (ZeRO 1), and not after each microbatch
            (ZeRO 2). Each tower then keeps the sums of all its gradients.
        """
        self._groups = groups
        constraints = constraints_of(variables)
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        whole = constraints if rule.elementwise else templates
        cuts = {owner: _cut_of(owner, shards, templates, whole, len(groups)) for owner in range(len(groups[0]))}
        self._held = [_held(shard, cuts[shard.owner][shard.name], templates, rule, groups) for shard in shards]
        parts = [part for held in self._held for part in held.parts]
        owners = OwnersOfGroups(owners_of(parts, list(templates)), self._held, groups, meet_late)
        super().__init__(variables, rule, parts, owners, device=groups[0][0])

    def read(self):
        of_towers = []
        for group in self._groups:
            values = [held.read(group[held.shard.owner]) for held in self._held]
            of_towers.append(by_name(self._held, values, Slices).values())
        parameters = [Copies(values) for values in zip(*of_towers, strict=True)]
        return parameters, [variable.read_value() for variable in self.state.values()]

    @property
    def notice(self) -> str:
        """A line for the user: how much optimizer state each device has."""
        devices = [device for group in self._groups for device in group]
        slots = self.slots_on(devices)
        return f"{len(self._groups)} towers share their optimizer state, device by device; {told(slots)}"


def _cut_of(
    owner: int, shards: Sequence[Shard], templates: Mapping, whole: Collection[str], num_groups: int
) -> Mapping[str, list[Shard]]:
    """How the towers share what their devices with index `owner` hold: shards of it by name, owned by towers."""
    own = {shard.name: shard for shard in shards if shard.owner == owner}
    found: dict[str, list[Shard]] = {name: [] for name in own}
    for shard in shards_of(
        {name: _shape_of(shard, templates[name]) for name, shard in own.items()},
        num_groups,
        item_bytes={name: tf.as_dtype(templates[name].dtype).size for name in own},
        whole={name for name in own if name in whole},
        dimensions={name: shard.dimension for name, shard in own.items() if shard.dimension is not None},
    ):
        found[shard.name].append(shard)
    return found


def _shape_of(shard: Shard, template: keras.Variable) -> tuple[int, ...]:
    shape = list(template.shape)
    if shard.dimension is not None:
        shape[shard.dimension] = shard.end - shard.begin
    return tuple(shape)


def _held(shard: Shard, cuts: Sequence[Shard], templates: Mapping, rule: UpdateRule, groups: Groups) -> Held:
    """What the devices with the index `shard.owner` hold of a parameter.

    Args:
      shard: which part of it.
      cuts: how the towers share that, as shards of it.
      templates: the parameters by name.
      rule: names the slots.
      groups: the devices of each tower.
    """
    counterparts = [group[shard.owner] for group in groups]
    parts = []
    for cut in cuts:
        owner = counterparts[cut.owner]
        holders = list(dict.fromkeys([owner, *counterparts]))
        parts.append(CopiedPart.of(_within(shard, cut), templates[shard.name], rule, holders, [owner]))
    dimension = cuts[0].dimension if cuts[0].dimension is not None else 0
    return Held(shard, parts, dimension)


def _within(shard: Shard, cut: Shard) -> Shard:
    """A shard of a shard, as a shard of the whole parameter."""
    if cut.dimension is None:
        return dataclasses.replace(shard, owner=cut.owner)
    begin = shard.begin if shard.dimension is not None else 0
    return Shard(shard.name, cut.owner, cut.dimension, begin + cut.begin, begin + cut.end)
