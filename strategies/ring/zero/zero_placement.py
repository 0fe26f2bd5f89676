"""ZeRO 1 and 2 over the workers of a ring: parameters on every worker, each slot and its update on an owner.

    sums of worker 0 --+                    +--> / weight, clip, update its parts --+              +--> every part
                       +-- reduce-scatter --+                                       +- all-gather -+
    sums of worker 1 --+                    +--> / weight, clip, update its parts --+              +--> every part

Both exchanges together send as many bytes as an all-reduce. To divide each pack of parameters evenly, large
parameters are sliced (`towers.parameters.shards`). With stage 1 gradients are sent once a step, with stage 2 after
each microbatch. New values are sent after skipped updates too, so that no exchange is in a conditional. One more
exchange, of 8 bytes, sums the squared norm: if it is NaN, all workers skip the update.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from strategies.ring.exchange.collectives import WorkerExchange
from strategies.ring.owners import SpreadOwners, sizes_by_owner
from strategies.ring.zero.remote_variable import RemoteVariable
from towers import packing
from towers.parameters.placement import (
    canonical_names,
    constraints_of,
    make_slots,
    set_state,
    variables_like,
)
from towers.parameters.sharded_placement import by_name, finish_parts, owners_of, part_of, shards_for, update_parts
from towers.parameters.shards import Shard
from towers.parameters.sliced_variable import SlicedVariable
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


@dataclasses.dataclass(frozen=True)
class SpreadPart:
    """A parameter or a slice of it. Its owner's rank is `shard.owner`.

    Attributes:
      shard: the parameter, and which part of it this is.
      device: this worker's device for the part.
      variable: this worker's copy; a variable without a value if only the owner has one.
      slots: by slot name; variables without a value for parts of other owners.
    """

    shard: Shard
    device: str
    variable: tf.Variable | RemoteVariable
    slots: Mapping[str, tf.Variable | RemoteVariable]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.variable.shape.num_elements()


class OwnedPlacement:
    """The common part of placements in which each worker updates its own parts.

    Attributes:
      parts: the parts of all parameters, in order.
      parameters, state, slots: as `Placement`; sliced ones are `SlicedVariable`. Variables of other owners have
        values on rank 0, from `strategies.ring.zero.remote_variable`, while it writes or reads a checkpoint.
      spread_kinds: those of 'parameters' and 'slots' of which each worker holds only its own part.
    """

    spread_kinds: tuple[str, ...]

    def __init__(
        self,
        parts: Sequence[SpreadPart],
        variables: ModelVariables,
        rule: UpdateRule,
        device: str,
        exchange: WorkerExchange,
    ):
        """Args:
        parts: parts of all parameters, in order.
        variables: give the first values of the state.
        rule: says which slots there are.
        device: the device of this worker's state.
        exchange: exchanges between the workers.
        """
        self.parts, self._device, self._exchange = parts, device, exchange
        self._constraints = constraints_of(variables)
        with tf.device(device):
            self.state = variables_like(variables.state)
        self.parameters = by_name(parts, [part.variable for part in parts], SlicedVariable)
        self.slots = {
            slot: by_name(parts, [part.slots[slot] for part in parts], SlicedVariable) for slot in rule.slot_names
        }
        self._own = [part for part in parts if part.shard.owner == exchange.rank]

    def update(self, is_allowed, means, new_state, *, rule, rate, update):
        def update_own():
            update_parts(rule, self._own, self._constraints, means, rate, update, is_allowed)
            set_state(self.state, new_state, is_allowed)

        is_allowed.run(update_own)

    def finish(self, is_last, *, rule, updates):
        def finish_own():
            finish_parts(rule, self._own, self._constraints, updates, is_last)

        is_last.run(finish_own)

    @property
    def parameters_with_owners(self) -> list[tuple[tf.Variable | RemoteVariable, int]]:
        """(part, rank that has its values), in the same order on all workers."""
        return [(part.variable, part.shard.owner) for part in self.parts]

    @property
    def slots_with_owners(self) -> list[tuple[tf.Variable | RemoteVariable, int]]:
        """As `parameters_with_owners`, for the slots of all parts."""
        return [(variable, part.shard.owner) for part in self.parts for variable in part.slots.values()]

    @property
    def spread_with_owners(self) -> list[tuple[tf.Variable | RemoteVariable, int]]:
        """As `parameters_with_owners`, for all variables of which each worker holds only its own parts."""
        found = {"parameters": self.parameters_with_owners, "slots": self.slots_with_owners}
        return [each for kind in self.spread_kinds for each in found[kind]]

    def _bytes_by_worker(self, variables: Sequence[tuple[tf.Variable | RemoteVariable, int]]) -> str:
        """How many bytes of some variables each worker has, for the user."""
        return bytes_by_worker(variables, self._exchange.num_workers)


class SpreadPlacement(OwnedPlacement):
    """Implements `towers.parameters.placement.Placement` on one worker, which has all parameters.

    Attributes:
      owners: where their gradients meet.
    """

    spread_kinds = ("slots",)

    def __init__(
        self,
        variables: ModelVariables,
        rule: UpdateRule,
        device: str,
        *,
        exchange: WorkerExchange,
        each_microbatch: bool,
        dimensions: Mapping[str, int] | None = None,
    ):
        """Args:
        variables: give the first values.
        rule: says which slots there are.
        device: the device of this worker's copies and slots.
        exchange: exchanges between the workers.
        each_microbatch: as for `SpreadOwners`.
        dimensions: as for `towers.parameters.shards.shards_of`.
        """
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        shards, packs = _shards_and_packs(templates, rule, constraints_of(variables), exchange, dimensions)
        with tf.device(device):
            parts = [_part(shard, templates[shard.name], rule, device, exchange.rank) for shard in shards]
        super().__init__(parts, variables, rule, device, exchange)
        self.owners = SpreadOwners(
            exchange,
            owners_of(self.parts, list(templates)),
            [shard.owner for shard in shards],
            packs,
            [tf.TensorShape(template.shape) for template in templates.values()],
            each_microbatch=each_microbatch,
        )

    def read(self):
        with tf.device(self._device):
            values = [part.variable.read_value() for part in self.parts]
            parameters = by_name(self.parts, values, tf.concat)
            return list(parameters.values()), [variable.read_value() for variable in self.state.values()]

    def update(self, is_allowed, means, new_state, *, rule, rate, update):
        super().update(is_allowed, means, new_state, rule=rule, rate=rate, update=update)
        if rule.num_steps is None:
            self._share()

    def finish(self, is_last, *, rule, updates):
        """Also sends the new values if the rule has a `finish`: `update` leaves that to this method."""
        super().finish(is_last, rule=rule, updates=updates)
        self._share()

    def _share(self) -> None:
        """Sends the owners' values to every worker: one all-gather for each dtype, after skipped updates too."""
        with tf.device(self._device):
            for dtype in dict.fromkeys(part.variable.dtype for part in self.parts):
                self._share_those([part for part in self.parts if part.variable.dtype == dtype], dtype)

    def _share_those(self, parts: Sequence[SpreadPart], dtype: tf.DType) -> None:
        by_owner = sorted(parts, key=lambda part: part.shard.owner)
        own = [part.variable.read_value() for part in parts if part.shard.owner == self._exchange.rank]
        sizes = sizes_by_owner([(part.shard.owner, part.size) for part in parts], self._exchange.num_workers)
        gathered = self._exchange.all_gather(packing.joined(own) if own else tf.zeros([0], dtype), sizes)
        for part, value in zip(by_owner, packing.parted(gathered, [p.variable for p in by_owner]), strict=True):
            if part.shard.owner != self._exchange.rank:
                part.variable.assign(value)

    @property
    def notice(self) -> str:
        """A line for the user: how much of the optimizer state each worker has."""
        return notice_of_slots(self.slots_with_owners, self._exchange.num_workers)


def notice_of_slots(slots_with_owners: Sequence[tuple], num_workers: int) -> str:
    """A line for the user: how much of the optimizer state each worker has."""
    held = bytes_by_worker(slots_with_owners, num_workers)
    return f"optimizer state is divided over {num_workers} workers, in bytes: {held}"


def bytes_by_worker(variables_with_owners: Sequence[tuple], num_workers: int) -> str:
    """How many bytes of some variables each worker has, for the user; a variable comes with its owner's rank."""
    held = [0] * num_workers
    for variable, owner in variables_with_owners:
        held[owner] += variable.dtype.size * variable.shape.num_elements()
    return ", ".join(f"{count:,} on worker {rank}" for rank, count in enumerate(held))


def _part(shard: Shard, template, rule: UpdateRule, device: str, rank: int) -> SpreadPart:
    variable = part_of(shard, template)
    if shard.owner == rank:
        slots = {slot: own[shard.name] for slot, own in make_slots(rule, {shard.name: variable}).items()}
    else:
        slots = {slot: RemoteVariable(variable, keeps=rank == 0) for slot in rule.slot_names}
    return SpreadPart(shard, device, variable, slots)


def _shards_and_packs(templates, rule, constraints, exchange, dimensions) -> tuple[list[Shard], list[list[int]]]:
    """The shards of all parameters, in order, and the indices of the shards in each pack.

    Parameters that can be sliced are divided pack by pack, so that all workers send and sum an equal part of each
    pack.
    """
    names = list(templates)
    whole = None if rule.elementwise else shards_for(templates, rule, constraints, exchange.num_workers)
    of_name: dict[str, list[Shard]] = {} if whole is None else {shard.name: [shard] for shard in whole}
    packs = _packs(templates, exchange.options.pack_bytes(exchange.num_workers))
    if whole is None:
        for pack in packs:
            of_pack = {name: templates[name] for name in pack}
            for shard in shards_for(of_pack, rule, constraints, exchange.num_workers, dimensions):
                of_name.setdefault(shard.name, []).append(shard)
    shards = [shard for name in names for shard in of_name[name]]
    indices: dict[str, list[int]] = {}
    for index, shard in enumerate(shards):
        indices.setdefault(shard.name, []).append(index)
    return shards, [[index for name in pack for index in indices[name]] for pack in packs]


def _packs(templates, bytes_per_pack: int) -> list[list[str]]:
    """Names of the parameters in each pack, in the model's order; a pack has a single dtype."""
    found = []
    for dtype in dict.fromkeys(template.dtype for template in templates.values()):
        names = [name for name, template in templates.items() if template.dtype == dtype]
        sizes = [tf.TensorShape(templates[name].shape).num_elements() * tf.as_dtype(dtype).size for name in names]
        found += [[names[index] for index in sorted(pack)] for pack in packing.packs(sizes, bytes_per_pack)]
    return found
