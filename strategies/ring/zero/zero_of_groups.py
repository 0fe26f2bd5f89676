"""ZeRO 1 and 2 over ring workers with towers of several devices: corresponding devices share optimizer state.

    stage:2                  worker 0         worker 1
    stage 0's parameters     copy on CPU:0    copy on CPU:0      half of their slots and updates on each
    stage 1's parameters     copy on CPU:1    copy on CPU:1      half of their slots and updates on each

Likewise for slices and branches. So each device and its counterparts form a `SpreadPlacement` of what they hold.
Gradients of a worker's own towers meet first, on the devices of its first tower; the other towers hold no
optimizer state. All workers make these exchanges in the same order: device by device.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from strategies.ring.exchange.collectives import WorkerExchange
from strategies.ring.owners import SpreadOwners, norms_over_workers
from strategies.ring.zero.remote_variable import RemoteVariable
from strategies.ring.zero.zero_placement import SpreadPlacement, notice_of_slots
from towers.owners import ManyOwners, Slices
from towers.parameters.placement import canonical_names
from towers.parameters.sharded_placement import by_name, owners_of
from towers.parameters.shards import Shard
from towers.parameters.sliced_variable import SlicedVariable
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter, or a slice of it, as one device of a tower holds it.

    Attributes:
      shard: the parameter, and which part of it; the owner is the index of the device in the tower.
      device: the device.
    """

    shard: Shard
    device: str


@dataclasses.dataclass(frozen=True)
class HeldTemplate:
    """A device's value or slice of a parameter, with the attributes of a Keras variable that a placement reads.

    Attributes:
      path: canonical name of the parameter.
      value: its values.
      constraint: Keras's constraint, or None.
    """

    path: str
    value: tf.Tensor
    constraint: object

    @classmethod
    def of(cls, shard: Shard, template: keras.Variable) -> "HeldTemplate":
        value = tf.convert_to_tensor(template.value)
        if shard.dimension is not None:
            value = value[(slice(None),) * shard.dimension + (slice(shard.begin, shard.end),)]
        return cls(shard.name, value, template.constraint)

    @property
    def shape(self) -> tf.TensorShape:
        return self.value.shape

    @property
    def dtype(self) -> tf.DType:
        return self.value.dtype


@dataclasses.dataclass(frozen=True)
class OwnersByDevice:
    """Implements `towers.owners.Owners` by the `SpreadOwners` of each device and its counterparts.

    A list of parts contains those of the first device, then those of the second, and so on.

    Attributes:
      of_towers: where the gradients of this worker's towers meet, in the order of the parameters.
      devices: the devices of a tower.
      homes: for each gradient of `of_towers` the index of its device.
      owners: the `SpreadOwners` of each device.
      parameters: for each device the indices of the parameters of its parts.
      num_parameters: number of parameters of the model.
      exchange: sums over the workers.
      each_microbatch: as for `SpreadOwners`.
    """

    of_towers: ManyOwners
    devices: Sequence[str]
    homes: Sequence[int]
    owners: Sequence[SpreadOwners]
    parameters: Sequence[Sequence[int]]
    num_parameters: int
    exchange: WorkerExchange
    each_microbatch: bool

    def cut(self, of_tower):
        return self.of_towers.cut(of_tower)

    def keep(self, per_tower):
        by_device = [self._by_home(of_tower) for of_tower in per_tower]
        return self._on_each(lambda index, owners: owners.keep([of_tower[index] for of_tower in by_device]))

    def add(self, kept):
        by_device = [self._by_device_kept(of_one) for of_one in kept]
        return self._on_each(lambda index, owners: owners.add([of_one[index] for of_one in by_device]))

    def meet(self, kept):
        by_device = self._by_device_kept(kept)
        return self._on_each(lambda index, owners: owners.meet(by_device[index]))

    def each(self, function, *parts):
        by_device = [self.by_device(values) for values in parts]
        return self._on_each(lambda index, owners: owners.each(function, *(one[index] for one in by_device)))

    def norm(self, squares):
        return self.owners[0].norm(squares)

    def norms(self, squares):
        parameters = [parameter for of_device in self.parameters for parameter in of_device]
        return norms_over_workers(self.exchange, parameters, self.num_parameters, squares)

    def by_device(self, values: Sequence) -> list[Sequence]:
        """The values of parts, device by device."""
        return _cut(values, [len(of_device) for of_device in self.parameters])

    def _by_device_kept(self, kept: Sequence) -> list[Sequence]:
        """What is kept, device by device: gradients of the device's parts, or of all that it holds."""
        if self.each_microbatch:
            return self.by_device(kept)
        return _cut(kept, [self.homes.count(index) for index in range(len(self.devices))])

    def _by_home(self, of_tower: Sequence) -> list[Sequence]:
        """The gradients of a tower, device by device."""
        return [
            [gradient for gradient, home in zip(of_tower, self.homes, strict=True) if home == index]
            for index in range(len(self.devices))
        ]

    def _on_each(self, compute: Callable[[int, SpreadOwners], list]) -> list:
        """Computes `compute(index, owners)` on each device, and joins the resulting lists."""
        found = []
        for index, (device, owners) in enumerate(zip(self.devices, self.owners, strict=True)):
            with tf.device(device):
                found += compute(index, owners)
        return found


class SpreadGroups:
    """Implements `towers.parameters.placement.Placement` on one worker. The first device has all of the state.

    Attributes:
      owners: where the gradients meet.
      parameters, state, slots: as `Placement`; sliced ones are `SlicedVariable`. Slots of other owners are as in
        `SpreadPlacement`.
    """

    spread_kinds = ("slots",)

    def __init__(
        self,
        variables: ModelVariables,
        rule: UpdateRule,
        devices: Sequence[str],
        shards: Sequence[Shard],
        *,
        exchange: WorkerExchange,
        each_microbatch: bool,
    ):
        """Args:
        variables: give the first values.
        rule: says which slots there are.
        devices: devices of this worker's first tower, which hold the variables.
        shards: shards of all parameters, in order; the owner of each is the index of a device.
        exchange: exchanges between the workers.
        each_microbatch: as for `SpreadOwners`.
        """
        names = canonical_names(variables.parameters)
        templates = dict(zip(names, variables.parameters, strict=True))
        self._exchange = exchange
        self._held = [Held(shard, devices[shard.owner]) for shard in shards]
        self._of_devices = []
        for index, device in enumerate(devices):
            own = [shard for shard in shards if shard.owner == index]
            held = ModelVariables(
                parameters=tuple(HeldTemplate.of(shard, templates[shard.name]) for shard in own),
                state=variables.state if index == 0 else (),
                seeds=(),
            )
            self._of_devices.append(
                SpreadPlacement(
                    held,
                    rule,
                    device,
                    exchange=exchange,
                    each_microbatch=each_microbatch,
                    # A slice of a slice is one of the whole parameter.
                    dimensions={one.name: one.dimension for one in own if one.dimension is not None},
                )
            )
        self.parameters = self._by_name([one.parameters for one in self._of_devices], _joined)
        self.slots = {
            slot: self._by_name([one.slots[slot] for one in self._of_devices], _joined) for slot in rule.slot_names
        }
        self.state = self._of_devices[0].state
        self.owners = OwnersByDevice(
            of_towers=owners_of(self._held, names),
            devices=devices,
            homes=[shard.owner for shard in shards],
            owners=[one.owners for one in self._of_devices],
            parameters=[
                [names.index(part.shard.name) for part in one.parts if part.shard.owner == exchange.rank]
                for one in self._of_devices
            ],
            num_parameters=len(names),
            exchange=exchange,
            each_microbatch=each_microbatch,
        )

    def _by_name(self, by_device: Sequence[Mapping], joined: Callable[[list, int], object]) -> dict:
        """Merges the devices' mappings from parameter names into one; `joined` as for `by_name`."""
        held = [by_device[held.shard.owner][held.shard.name] for held in self._held]
        return by_name(self._held, held, joined)

    def read(self):
        by_device, state = [], []
        for one in self._of_devices:
            values, of_device = one.read()
            by_device.append(dict(zip(one.parameters, values, strict=True)))
            state += of_device
        return list(self._by_name(by_device, Slices).values()), state

    def update(self, is_allowed, means, new_state, *, rule, rate, update):
        for one, own in zip(self._of_devices, self.owners.by_device(means), strict=True):
            of_device = new_state if one.state else {}
            one.update(is_allowed, own, of_device, rule=rule, rate=rate, update=update)

    def finish(self, is_last, *, rule, updates):
        for one in self._of_devices:
            one.finish(is_last, rule=rule, updates=updates)

    @property
    def slots_with_owners(self) -> list[tuple[tf.Variable | RemoteVariable, int]]:
        """As `SpreadPlacement.slots_with_owners`."""
        return [slot for one in self._of_devices for slot in one.slots_with_owners]

    spread_with_owners = slots_with_owners

    @property
    def notice(self) -> str:
        """A line for the user: how much of the optimizer state each worker has."""
        return notice_of_slots(self.slots_with_owners, self._exchange.num_workers)


def _joined(of_devices: Sequence, dimension: int) -> SlicedVariable:
    """A `SlicedVariable` of the devices' slices, each whole or itself in slices along the same dimension."""
    parts = []
    for one in of_devices:
        parts += one.parts if isinstance(one, SlicedVariable) else [one]
    return SlicedVariable(parts, dimension)


def _cut(values: Sequence, sizes: Sequence[int]) -> list[Sequence]:
    """Consecutive parts of these lengths."""
    found, begin = [], 0
    for size in sizes:
        found.append(values[begin : begin + size])
        begin += size
    return found
