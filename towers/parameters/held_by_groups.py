"""Which parameters each device of a tower of several devices uses, and how the towers share their ownership.

    data:2,stage:2           tower 0             tower 1
    stage 0's parameters     used on CPU:0       used on CPU:2       half of each is owned by CPU:0, half by CPU:2
    stage 1's parameters     used on CPU:1       used on CPU:3       likewise

Likewise for slices and branches. Gradients meet at the owners of their parts.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import keras
import tensorflow as tf

from towers import gradients
from towers.gradients import Gradient
from towers.owners import MetAtOwners, Slices, parts_of
from towers.parameters.shards import Shard, shape_of, shards_of

Groups = Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter, or a slice of it, as one device of every tower uses it.

    Attributes:
      shard: the parameter, and which part of it; the owner is the index of the device in each tower.
      cuts: its parts, as shards of the parameter. The owner of each is the index of the tower whose device owns
        it, or of a worker with one tower.
      dimension: dimension along which the parts follow each other.
    """

    shard: Shard
    cuts: Sequence[Shard]
    dimension: int

    @property
    def lengths(self) -> list[int]:
        """Lengths of the parts in `dimension`."""
        return [cut.end - cut.begin for cut in self.cuts]

    def cut(self, gradient: Gradient, device: str) -> list[Gradient]:
        """The parts of the gradient of what is held, cut on the device that computed it."""
        with tf.device(device):
            return [gradient] if len(self.cuts) == 1 else parts_of(gradient, self.dimension, self.lengths)


@dataclasses.dataclass(frozen=True)
class OwnersOfGroups(MetAtOwners):
    """Implements `towers.owners.Owners` for towers of several devices.

    Attributes:
      owners: where the gradients of the parts meet.
      held: what each tower uses, in the order of the tower's gradients.
      groups: the devices of each tower.
      meet_late: whether gradients meet once a step, not after each microbatch.
    """

    held: Sequence[Held]
    groups: Groups
    meet_late: bool

    def cut(self, of_tower):
        """The gradients of what is held, still whole: the devices cut them later, when the tower is known."""
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
        """(device, what it holds), tower by tower."""
        return [(group[held.shard.owner], held) for group in self.groups for held in self.held]


def held_by_groups(
    shards: Sequence[Shard], templates: Mapping[str, keras.Variable], whole: Collection[str], groups: Groups
) -> list[Held]:
    """What each tower uses, in order, and how the towers share its ownership: about equally, device by device.

    Args:
      shards: shards of all parameters, in order; the owner of each is the index of a device in its tower.
      templates: the parameters by canonical name.
      whole: names of parameters that must not be cut.
      groups: the devices of each tower.
    """
    cuts = {owner: _cuts_of(owner, shards, templates, whole, len(groups)) for owner in range(len(groups[0]))}
    found = []
    for shard in shards:
        own = cuts[shard.owner][shard.name]
        dimension = own[0].dimension if own[0].dimension is not None else 0
        found.append(Held(shard, [within(shard, cut) for cut in own], dimension))
    return found


def _cuts_of(
    owner: int, shards: Sequence[Shard], templates: Mapping, whole: Collection[str], num_groups: int
) -> Mapping[str, list[Shard]]:
    """How the towers share what their devices of index `owner` hold: by parameter name, shards owned by towers."""
    own = {shard.name: shard for shard in shards if shard.owner == owner}
    found: dict[str, list[Shard]] = {name: [] for name in own}
    for shard in shards_of(
        {name: shape_of(shard, templates[name].shape) for name, shard in own.items()},
        num_groups,
        item_bytes={name: tf.as_dtype(templates[name].dtype).size for name in own},
        whole={name for name in own if name in whole},
        dimensions={name: shard.dimension for name, shard in own.items() if shard.dimension is not None},
    ):
        found[shard.name].append(shard)
    return found


def within(shard: Shard, cut: Shard) -> Shard:
    """A shard of a shard, as a shard of the whole parameter."""
    if cut.dimension is None:
        return dataclasses.replace(shard, owner=cut.owner)
    begin = shard.begin if shard.dimension is not None else 0
    return Shard(shard.name, cut.owner, cut.dimension, begin + cut.begin, begin + cut.end)
