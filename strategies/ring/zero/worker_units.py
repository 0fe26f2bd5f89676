"""Units of parameters over the workers of a ring, gathered from their owners; gradients are sent to the owners.

gather     part of rank 0 | part of rank 1 | ...   -- all-gather -->      the parameters, on every worker
scatter    gradients of each worker                -- reduce-scatter -->  each rank's part of their sums

Each slice that a tower's device holds is a parameter here, and is divided over the workers separately.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from strategies.ring.exchange.collectives import WorkerExchange
from strategies.ring.owners import own_sums, sizes_by_owner
from towers import packing
from towers.owners import parts_of
from towers.parameters.held_by_groups import Held, within
from towers.parameters.placement import canonical_names, constraints_of
from towers.parameters.shards import Shard, shape_of, shards_of
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule

# A smaller parameter is not divided: it would hardly shorten the messages of a unit.
_SMALLEST_DIVIDED_BYTES = 1024
# A unit has at least 1 / 16 of the size of a pack of gradients, by default 256 KiB: a call costs some 0.5 ms of
# CPU time. A step of a transformer of 0.8 MB takes 1.07 times a plain ring's CPU time (1.12 without this limit), a
# step of one of 43 MB 1.00.
_SMALL_UNITS_IN_A_PACK = 16


class WorkerUnits:
    """Implements `towers.gathering.exchange.UnitExchange`.

    Attributes:
      exchange: exchanges between the workers.
      held: what the devices of a tower use of all parameters, in order; the owner of each cut is a worker's rank.
        Each large one is cut evenly, so that in every call all links carry about the same number of bytes. In this
        class, "parameters" are the entries of this list, and indices are indices of this list.
      specs: shape and dtype of each entry of `held`.
      bytes_per_call, small_bytes: as for `UnitExchange`.
    """

    def __init__(
        self,
        variables: ModelVariables,
        rule: UpdateRule,
        exchange: WorkerExchange,
        shards: Sequence[Shard] | None = None,
    ):
        """Args:
        variables: the model's.
        rule: determines whether a parameter may be divided.
        exchange: exchanges between the workers.
        shards: what each device of a tower uses, of all parameters, in order; the owner of a shard is the index of
          the device. None if one device uses all parameters.
        """
        self.exchange = exchange
        self.bytes_per_call = exchange.options.pack_bytes(exchange.num_workers)
        self.small_bytes = self.bytes_per_call // _SMALL_UNITS_IN_A_PACK
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        shards = [Shard(name, 0) for name in templates] if shards is None else shards
        uncut = constraints_of(variables) if rule.elementwise else templates
        self.held = held_by_workers(shards, templates, uncut, exchange.num_workers)
        self.specs = [
            tf.TensorSpec(shape_of(shard, templates[shard.name].shape), templates[shard.name].dtype)
            for shard in shards
        ]
        self._shards = [held.cuts for held in self.held]

    def gather(self, parameters, purpose):
        def gathered(*own):
            here = [index for index in parameters if any(map(self._is_own, self._shards[index]))]
            given, found = dict(zip(here, own, strict=True)), {}
            for dtype, indices in self._by_dtype(parameters).items():
                vectors = [given[index] for index in indices if index in given]
                vector = packing.joined(vectors) if vectors else tf.zeros([0], dtype)
                pieces = self._pieces(indices)
                sizes = sizes_by_owner(
                    [(shard.owner, spec.shape.num_elements()) for _, shard, spec in pieces],
                    self.exchange.num_workers,
                )
                gathered = self.exchange.all_gather(vector, sizes, purpose)
                found |= self._joined(pieces, gathered)
            return [found[index] for index in parameters]

        return gathered

    def _joined(self, pieces, gathered: tf.Tensor) -> dict[int, tf.Tensor]:
        """Values of the parameters by index, from the vector of their pieces."""
        parts: dict[int, list[tf.Tensor]] = {}
        for (index, _, _), part in zip(
            pieces, packing.parted(gathered, [spec for _, _, spec in pieces]), strict=True
        ):
            parts.setdefault(index, []).append(part)
        return {
            index: own[0] if len(own) == 1 else tf.concat(own, self.held[index].dimension)
            for index, own in parts.items()
        }

    def scatter(self, parameters, purpose):
        def scattered(*gradients):
            given, found = dict(zip(parameters, gradients, strict=True)), {}
            for indices in self._by_dtype(parameters).values():
                cut = {index: self._cut(index, given[index]) for index in indices}
                pieces = self._pieces(indices)
                parts = [next(cut[index]) for index, _, _ in pieces]
                summed = own_sums(self.exchange, parts, [shard.owner for _, shard, _ in pieces], purpose)
                own = [index for index, shard, _ in pieces if self._is_own(shard)]
                found |= zip(own, summed, strict=True)
            return [found[index] for index in parameters if index in found]

        return scattered

    def _cut(self, index: int, gradient: tf.Tensor) -> Iterator[tf.Tensor]:
        """The parts of a parameter's gradient."""
        gradient, held = tf.ensure_shape(gradient, self.specs[index].shape), self.held[index]
        return iter([gradient] if len(held.cuts) == 1 else parts_of(gradient, held.dimension, held.lengths))

    def _pieces(self, indices: Sequence[int]) -> list[tuple[int, Shard, tf.TensorSpec]]:
        """(index of the parameter, shard, its spec) of all shards of these parameters, sorted by owners' ranks."""
        found = []
        for index in indices:
            whole = self.specs[index]
            for shard in self._shards[index]:
                found.append((index, shard, tf.TensorSpec(shape_of(shard, whole.shape), whole.dtype)))
        return sorted(found, key=lambda piece: piece[1].owner)

    def _by_dtype(self, parameters: Sequence[int]) -> dict[tf.DType, list[int]]:
        found: dict[tf.DType, list[int]] = {}
        for index in parameters:
            found.setdefault(self.specs[index].dtype, []).append(index)
        return found

    def _is_own(self, shard: Shard) -> bool:
        return shard.owner == self.exchange.rank


def held_by_workers(
    shards: Sequence[Shard], templates: Mapping[str, keras.Variable], whole: Collection[str], num_workers: int
) -> list[Held]:
    """What a tower uses, in order, and how the workers share it: evenly, but small parameters have one owner.

    Args:
      shards: shards of all parameters, in order; the owner of each is the index of a device of a tower.
      templates: the parameters by canonical name.
      whole: names of the parameters that must not be cut. If none may be cut, they are assigned in order of
        falling size, as in `shards_of`.
      num_workers: number of owners.
    """
    shapes = [shape_of(shard, templates[shard.name].shape) for shard in shards]
    if all(shard.name in whole for shard in shards):
        sizes = {name: tf.as_dtype(template.dtype).size for name, template in templates.items()}
        by_name = {shard.name: shape for shard, shape in zip(shards, shapes, strict=True)}
        owners = {one.name: one.owner for one in shards_of(by_name, num_workers, item_bytes=sizes, whole=whole)}
        return [Held(shard, [within(shard, Shard(shard.name, owners[shard.name]))], 0) for shard in shards]
    owned, found = [0] * num_workers, []
    for shard, shape in zip(shards, shapes, strict=True):
        item_bytes = tf.as_dtype(templates[shard.name].dtype).size
        cuts = [Shard(shard.name, owned.index(min(owned)))]
        if shard.name not in whole and math.prod(shape) * item_bytes >= _SMALLEST_DIVIDED_BYTES:
            cut = shards_of(
                {shard.name: shape},
                num_workers,
                item_bytes={shard.name: item_bytes},
                whole=(),
                # A slice of a slice must be a slice of the whole parameter, so it is along the same dimension.
                dimensions={} if shard.dimension is None else {shard.name: shard.dimension},
            )
            # A dimension of length 1 leaves the parameter whole: any worker may own it.
            cuts = cut if len(cut) > 1 else cuts
        for one in cuts:
            owned[one.owner] += math.prod(shape_of(one, shape)) * item_bytes
        dimension = shard.dimension if cuts[0].dimension is None else cuts[0].dimension
        found.append(Held(shard, [within(shard, one) for one in cuts], dimension or 0))
    return found
