"""ZeRO 1 and 2 over the workers of a ring: parameters on every worker, slots and updates each on its owner.

    sums of worker 0 --+                    +--> / weight, clip, update its parts --+              +--> every part
                       +-- reduce-scatter --+                                       +- all-gather -+
    sums of worker 1 --+                    +--> / weight, clip, update its parts --+              +--> every part

Both exchanges together send what an all-reduce sends. Each pack of parameters is divided evenly, for which large
ones are sliced (`towers.parameters.shards`). With stage 1 gradients are sent once a step, with stage 2 after each
microbatch.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from strategies.ring.collectives import WorkerExchange
from strategies.ring.owners import SpreadOwners, sizes_by_owner
from strategies.ring.remote_variable import RemoteVariable
from towers import packing
from towers.parameters.placement import (
    apply_rule,
    canonical_names,
    constraints_of,
    finish_rule,
    make_slots,
    run_if,
    set_state,
    variables_like,
)
from towers.parameters.sharded_placement import by_name, owners_of, part_of, shards_for
from towers.parameters.shards import Shard
from towers.parameters.sliced_variable import SlicedVariable
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


@dataclasses.dataclass(frozen=True)
class SpreadPart:
    """A parameter or a slice of it. Its owner's rank is `shard.owner`.

    Attributes:
      shard: which part of which parameter it is.
      device: this worker's device for parameters.
      variable: this worker's copy.
      slots: by slot name; of parts of other owners, variables without a value.
    """

    shard: Shard
    device: str
    variable: tf.Variable
    slots: Mapping[str, tf.Variable | RemoteVariable]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.variable.shape.num_elements()


class SpreadPlacement:
    """Implements `towers.parameters.placement.Placement` on one worker. Everything of the worker is on one device.

    Attributes:
      parts: the parts of all parameters, in order.
      owners: where their gradients meet.
      parameters, state, slots: as `Placement`; sliced ones are `SlicedVariable`. Slots of other owners have values
        on rank 0, from `strategies.ring.remote_variable`, while it writes or reads a checkpoint.
    """

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
        device: where this worker has its copies and its slots.
        exchange: exchanges between the workers.
        each_microbatch: as for `SpreadOwners`.
        dimensions: as for `towers.parameters.shards.shards_of`.
        """
        self._device, self._exchange = device, exchange
        self._constraints = constraints_of(variables)
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        shards, packs = _shards_and_packs(templates, rule, self._constraints, exchange, dimensions)
        with tf.device(device):
            self.parts = [_part(shard, templates[shard.name], rule, device, exchange.rank) for shard in shards]
            self.state = variables_like(variables.state)
        self.parameters = by_name(self.parts, [part.variable for part in self.parts], SlicedVariable)
        self.slots = {
            slot: by_name(self.parts, [part.slots[slot] for part in self.parts], SlicedVariable)
            for slot in rule.slot_names
        }
        self._own = [part for part in self.parts if part.shard.owner == exchange.rank]
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
        def update_own():
            with tf.device(self._device):
                for part, mean in zip(self._own, means, strict=True):
                    apply_rule(rule, *self._described(part), [mean], rate, update)
            set_state(self.state, new_state)

        run_if(is_allowed, update_own)
        if rule.num_steps is None:
            self._share()

    def finish(self, is_last, *, rule, updates):
        """Also sends what `update` has left to it: it follows each update of a rule that needs it."""

        def finish_own():
            with tf.device(self._device):
                for part in self._own:
                    finish_rule(rule, *self._described(part), updates)

        run_if(is_last, finish_own)
        self._share()

    def _share(self) -> None:
        """Gives every worker the owners' values: one all-gather for each dtype, after skipped updates too."""
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

    def _described(self, part: SpreadPart):
        """A part, its slots and its constraints by its parameter's name."""
        name = part.shard.name
        return {name: part.variable}, {slot: {name: own} for slot, own in part.slots.items()}, self._constraints

    @property
    def slots_with_owners(self) -> list[tuple[tf.Variable | RemoteVariable, int]]:
        """The slots of all parts, in the same order on all workers, and the ranks that have their values."""
        return [(variable, part.shard.owner) for part in self.parts for variable in part.slots.values()]

    @property
    def notice(self) -> str:
        """A line for the user: how much of the optimizer state each worker has."""
        return told_by_worker(self.slots_with_owners, self._exchange.num_workers)


def told_by_worker(slots_with_owners: Sequence[tuple], num_workers: int) -> str:
    """A line with the bytes of optimizer state of each worker, from slots and the ranks of their owners."""
    held = [0] * num_workers
    for variable, owner in slots_with_owners:
        held[owner] += variable.dtype.size * variable.shape.num_elements()
    written = ", ".join(f"{count:,} on worker {rank}" for rank, count in enumerate(held))
    return f"optimizer state is divided over {len(held)} workers, in bytes: {written}"


def _part(shard: Shard, template, rule: UpdateRule, device: str, rank: int) -> SpreadPart:
    variable = part_of(shard, template)
    if shard.owner == rank:
        slots = {slot: own[shard.name] for slot, own in make_slots(rule, {shard.name: variable}).items()}
    else:
        slots = {slot: RemoteVariable(variable, keeps=rank == 0) for slot in rule.slot_names}
    return SpreadPart(shard, device, variable, slots)


def _shards_and_packs(templates, rule, constraints, exchange, dimensions) -> tuple[list[Shard], list[list[int]]]:
    """The shards of all parameters, in order, and the indices of the shards in each pack.

    Parameters that can be sliced are divided pack by pack, so that all workers send and sum equally much of each.
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
    """Names of the parameters in each pack, in the model's order; those of a pack have one dtype."""
    found = []
    for dtype in dict.fromkeys(template.dtype for template in templates.values()):
        names = [name for name, template in templates.items() if template.dtype == dtype]
        sizes = [tf.TensorShape(templates[name].shape).num_elements() * tf.as_dtype(dtype).size for name in names]
        found += [[names[index] for index in sorted(pack)] for pack in packing.packs(sizes, bytes_per_pack)]
    return found
