"""ZeRO 3 over the workers of a ring: each has its own parts of the parameters, and gathers the others in units.

    own parts --+                +--> tower, unit by unit --+                    +--> / weight, update own parts
                +-- all-gather --+                          +-- reduce-scatter --+
    own parts --+                +--> tower, unit by unit --+                    +--> / weight, update own parts

The exchanges are in the tower's graph (`towers.gathering`); here are the variables.
"""

from collections.abc import Mapping
from typing import NamedTuple

import tensorflow as tf

from strategies.ring.owners import OwnParts
from strategies.ring.remote_variable import RemoteVariable
from strategies.ring.worker_units import WorkerUnits
from strategies.ring.zero_placement import OwnedPlacement, SpreadPart
from towers.gathering.exchange import OwnPart
from towers.parameters.placement import canonical_names, make_slots
from towers.parameters.sharded_placement import part_of
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
        device: str,
        units: WorkerUnits,
        homes: Mapping[str, str] | None = None,
    ):
        """Args:
        variables: give the first values.
        rule: says which slots there are.
        device: where this worker has its parts and their slots, and the state.
        units: says who has which part.
        homes: the device of the parts of each parameter by name, if not all are on `device`.
        """
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        names, rank = list(templates), units.exchange.rank
        homes = homes or dict.fromkeys(names, device)
        parts = []
        for shard in units.shards:
            with tf.device(homes[shard.name]):
                parts.append(_part(shard, templates[shard.name], rule, homes[shard.name], rank))
        super().__init__(parts, variables, rule, device, units.exchange)
        self._wholes = {name: tf.TensorSpec(each.shape, each.dtype) for name, each in templates.items()}
        self.owners = OwnParts(
            units.exchange,
            [names.index(part.shard.name) for part in self._own],
            len(names),
            [part.device for part in self._own],
        )

    def read(self):
        parts: dict[str, list] = {name: [] for name in self._wholes}
        for part in self._own:
            with tf.device(part.device):
                parts[part.shard.name].append(part.variable.read_value())
        with tf.device(self._device):
            state = [variable.read_value() for variable in self.state.values()]
        return [OwnPart(parts[name], whole) for name, whole in self._wholes.items()], state

    @property
    def notice(self) -> str:
        """A line for the user: how much of the parameters and of the optimizer state each worker has."""
        parameters, slots = self._told(self.parameters_with_owners), self._told(self.slots_with_owners)
        return (
            f"parameters are divided over {self._exchange.num_workers} workers, in bytes: {parameters}; "
            f"optimizer state: {slots}"
        )


class _Described(NamedTuple):
    """What a `RemoteVariable` is like."""

    shape: tf.TensorShape
    dtype: tf.DType
    device: str


def _part(shard: Shard, template, rule: UpdateRule, device: str, rank: int) -> SpreadPart:
    """A shard on the current device, `device`: with its values if this worker owns it."""
    if shard.owner == rank:
        variable = part_of(shard, template)
        slots = {slot: own[shard.name] for slot, own in make_slots(rule, {shard.name: variable}).items()}
    else:
        shape = tf.TensorShape(shape_of(shard, template.shape))
        # The device's name with its task.
        full_device = tf.Variable(0.0, trainable=False).device
        like = _Described(shape, tf.as_dtype(template.dtype), full_device)
        variable = RemoteVariable(like, keeps=rank == 0)
        slots = {slot: RemoteVariable(like, keeps=rank == 0) for slot in rule.slot_names}
    return SpreadPart(shard, device, variable, slots)
