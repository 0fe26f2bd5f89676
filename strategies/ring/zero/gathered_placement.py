"""ZeRO 3 over the workers of a ring: each holds its own parts of the parameters, and gathers the others in units.

    own parts --+                +--> towers, unit by unit --+                    +--> / weight, update own parts
                +-- all-gather --+                           +-- reduce-scatter --+
    own parts --+                +--> towers, unit by unit --+                    +--> / weight, update own parts

The exchanges are in the towers' graph (`towers.gathering`); this file has the variables. In a tower of several
devices, each device holds parts of what it uses: of its stage, its branches or its slices.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from strategies.ring.owners import OwnParts
from strategies.ring.zero.remote_variable import RemoteVariable
from strategies.ring.zero.worker_units import WorkerUnits
from strategies.ring.zero.zero_placement import OwnedPlacement, SpreadPart
from towers.gathering.exchange import OwnPart
from towers.owners import Slices
from towers.parameters.placement import canonical_names, make_slots
from towers.parameters.sharded_placement import by_name, part_of
from towers.parameters.shards import Shard, shape_of
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


class GatheredPlacement(OwnedPlacement):
    """Implements `towers.parameters.placement.Placement` on one worker.

    Attributes:
      owners: where gradients have met.
    """

    spread_kinds = ("parameters", "slots")

    def __init__(
        self,
        variables: ModelVariables,
        rule: UpdateRule,
        devices: Sequence[str],
        units: WorkerUnits,
    ):
        """Args:
        variables: give the initial values.
        rule: says which slots there are.
        devices: devices of this worker's first tower. Each holds this worker's parts of what it uses, with their
          slots; the first device holds the state.
        units: the units of parameters, with the owner of each part.
        """
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        names, rank = list(templates), units.exchange.rank
        parts = []
        for held in units.held:
            device = devices[held.shard.owner]
            with tf.device(device):
                parts += [_part(cut, templates[cut.name], rule, device, rank) for cut in held.cuts]
        super().__init__(parts, variables, rule, devices[0], units.exchange)
        self._units = units
        self.owners = OwnParts(
            units.exchange,
            [names.index(part.shard.name) for part in self._own],
            len(names),
            [part.device for part in self._own],
        )

    def read(self):
        parts, values = iter(self.parts), []
        for held, whole in zip(self._units.held, self._units.specs, strict=True):
            here = [
                part for part in itertools.islice(parts, len(held.cuts)) if part.shard.owner == self._exchange.rank
            ]
            own = []
            for part in here:
                with tf.device(part.device):
                    own.append(part.variable.read_value())
            values.append(OwnPart(own, whole))
        with tf.device(self._device):
            state = [variable.read_value() for variable in self.state.values()]
        return list(by_name(self._units.held, values, Slices).values()), state

    @property
    def notice(self) -> str:
        """A line for the user: how much of the parameters and of the optimizer state each worker has."""
        parameters, slots = (
            self._bytes_by_worker(self.parameters_with_owners),
            self._bytes_by_worker(self.slots_with_owners),
        )
        return (
            f"parameters are divided over {self._exchange.num_workers} workers, in bytes: {parameters}; "
            f"optimizer state: {slots}"
        )


class _Described(NamedTuple):
    """Shape, dtype and device of a `RemoteVariable`."""

    shape: tf.TensorShape
    dtype: tf.DType
    device: str


def _part(shard: Shard, template, rule: UpdateRule, device: str, rank: int) -> SpreadPart:
    """A shard on the current device, which is `device`; it has values if this worker owns it."""
    if shard.owner == rank:
        variable = part_of(shard, template)
        slots = {slot: own[shard.name] for slot, own in make_slots(rule, {shard.name: variable}).items()}
    else:
        shape = tf.TensorShape(shape_of(shard, template.shape))
        # The full name of the device, with its task.
        full_device = tf.Variable(0.0, trainable=False).device
        like = _Described(shape, tf.as_dtype(template.dtype), full_device)
        variable = RemoteVariable(like, keeps=rank == 0)
        slots = {slot: RemoteVariable(like, keeps=rank == 0) for slot in rule.slot_names}
    return SpreadPart(shard, device, variable, slots)
