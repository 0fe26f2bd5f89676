"""Units of parameters over the workers of a ring: gathered from their owners, and their gradients sent there.

gather     part of rank 0 | part of rank 1 | ...   -- all-gather -->      the parameters, on every worker
scatter    gradients of each worker                -- reduce-scatter -->  each rank's part of their sums
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from strategies.ring.collectives import WorkerExchange
from strategies.ring.owners import own_sums, sizes_by_owner
from towers import packing
from towers.owners import parts_of
from towers.parameters.placement import canonical_names, constraints_of
from towers.parameters.sharded_placement import shards_for
from towers.parameters.shards import Shard, shape_of
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule

# A smaller parameter is not divided: the messages of a unit would not become shorter by much.
_SMALLEST_DIVIDED_BYTES = 1024
# A unit is no smaller than this part of a pack of gradients, 256 KiB by default: a call costs some 0.5 ms of CPU
# time. A step of a transformer of 0.8 MB takes 1.07 times a plain ring's CPU time (1.12 without this), of one of
# 43 MB 1.00.
_SMALL_UNITS_IN_A_PACK = 16


class WorkerUnits:
    """Implements `towers.gathering.exchange.UnitExchange`.

    Attributes:
      exchange: exchanges between the workers.
      shards: the shards of all parameters, in order. Each large parameter is divided evenly over the workers, so
        that in every call all links carry about equally much.
      bytes_per_call, small_bytes: as `UnitExchange`.
    """

    def __init__(self, variables: ModelVariables, rule: UpdateRule, exchange: WorkerExchange):
        """Args:
        variables: the model's.
        rule: says whether a parameter may be divided.
        exchange: exchanges between the workers.
        """
        self.exchange = exchange
        self.bytes_per_call = exchange.options.pack_bytes(exchange.num_workers)
        self.small_bytes = self.bytes_per_call // _SMALL_UNITS_IN_A_PACK
        templates = dict(zip(canonical_names(variables.parameters), variables.parameters, strict=True))
        self.shards = shards_over_workers(templates, rule, constraints_of(variables), exchange.num_workers)
        self._wholes = [tf.TensorSpec(each.shape, each.dtype) for each in templates.values()]
        self._shards = [[shard for shard in self.shards if shard.name == name] for name in templates]

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
            index: own[0] if len(own) == 1 else tf.concat(own, self._shards[index][0].dimension)
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
        gradient, shards = tf.ensure_shape(gradient, self._wholes[index].shape), self._shards[index]
        if len(shards) == 1:
            return iter([gradient])
        return iter(parts_of(gradient, shards[0].dimension, [shard.end - shard.begin for shard in shards]))

    def _pieces(self, indices: Sequence[int]) -> list[tuple[int, Shard, tf.TensorSpec]]:
        """(index of the parameter, shard, its spec) of all shards of some parameters, ordered by their ranks."""
        found = []
        for index in indices:
            whole = self._wholes[index]
            for shard in self._shards[index]:
                found.append((index, shard, tf.TensorSpec(shape_of(shard, whole.shape), whole.dtype)))
        return sorted(found, key=lambda piece: piece[1].owner)

    def _by_dtype(self, parameters: Sequence[int]) -> dict[tf.DType, list[int]]:
        found: dict[tf.DType, list[int]] = {}
        for index in parameters:
            found.setdefault(self._wholes[index].dtype, []).append(index)
        return found

    def _is_own(self, shard: Shard) -> bool:
        return shard.owner == self.exchange.rank


def shards_over_workers(
    templates: Mapping[str, keras.Variable], rule: UpdateRule, constraints: Collection[str], num_workers: int
) -> list[Shard]:
    """The shards of all parameters, in order: each is divided evenly, but small ones have one owner.

    Args:
      templates: the parameters by canonical name.
      rule: if it needs whole parameters, none is divided.
      constraints: names of the parameters with a constraint; they are not divided.
      num_workers: number of owners.
    """
    if not rule.elementwise:
        return shards_for(templates, rule, constraints, num_workers)
    held, found = [0] * num_workers, []
    for name, template in templates.items():
        item_bytes = tf.as_dtype(template.dtype).size
        is_small = math.prod(template.shape) * item_bytes < _SMALLEST_DIVIDED_BYTES
        if name in constraints or is_small:
            own = [Shard(name, held.index(min(held)))]
        else:
            own = shards_for({name: template}, rule, constraints, num_workers)
        for shard in own:
            held[shard.owner] += math.prod(shape_of(shard, template.shape)) * item_bytes
        found += own
    return found
