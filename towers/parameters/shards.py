"""Which device owns each parameter, or each slice of a large one, so that all own about the same number of bytes.

    kernel          bias   kernel                embedding
    |---------------|------|---------------------|-------------|      bytes, in the model's order
    |    owner 0         |      owner 1       |   owner 2   |      cuts

A cut that falls into a large parameter slices it along one dimension; a small parameter goes whole to one side.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

# A parameter with fewer bytes than this fraction of an owner's mean share is not sliced.
_SMALLEST_SLICED = 1 / 20


@dataclasses.dataclass(frozen=True)
class Shard:
    """A parameter, or a slice of it, and its owner.

    Attributes:
      name: canonical name of the parameter.
      owner: index of the device that owns it.
      dimension: dimension along which the parameter is sliced; None if this is all of it.
      begin, end: indices in that dimension, `end` excluded; 0 and 0 for a whole parameter.
    """

    name: str
    owner: int
    dimension: int | None = None
    begin: int = 0
    end: int = 0


def shape_of(shard: Shard, whole: Sequence[int]) -> tuple[int, ...]:
    """The shape of a shard of a parameter of shape `whole`."""
    if shard.dimension is None:
        return tuple(whole)
    return (*whole[: shard.dimension], shard.end - shard.begin, *whole[shard.dimension + 1 :])


def shards_of(
    shapes: Mapping[str, Sequence[int]],
    num_owners: int,
    *,
    item_bytes: Mapping[str, int],
    whole: Collection[str],
    dimensions: Mapping[str, int] | None = None,
) -> list[Shard]:
    """The shards, in the order of the parameters.

    Args:
      shapes: the parameters' shapes by canonical name, in the model's order.
      num_owners: number of owners.
      item_bytes: bytes of an element of each parameter.
      whole: names of parameters that must not be sliced, because their update rule or constraint needs all of
        them. If none may be sliced, the largest goes first, to the owner with the fewest bytes (Graham 1969).
      dimensions: for some parameters the only dimension along which they may be sliced.
    """
    dimensions = dimensions or {}
    sizes = {name: math.prod(shape) * item_bytes[name] for name, shape in shapes.items()}
    if all(name in whole for name in shapes):
        return _largest_first(sizes, num_owners)
    mean = sum(sizes.values()) / num_owners
    found, position, owner = [], 0, 0
    for name, shape in shapes.items():
        begin, end = position, position + sizes[name]
        may_slice = shape and name not in whole and sizes[name] > mean * _SMALLEST_SLICED
        dimension = dimensions.get(name, _sliced_dimension(shape)) if may_slice else None
        # The cuts in this parameter, as indices of its dimension; a cut at 0 or at its length slices nothing.
        length = 1 if dimension is None else shape[dimension]
        cuts = [mean * k for k in range(owner + 1, num_owners) if mean * k < end]
        indices = [round((cut - begin) / max(1, sizes[name]) * length) for cut in cuts]
        bounds = [0, *indices, length]
        parts = [(owner + k, *bounds[k : k + 2]) for k in range(len(indices) + 1) if bounds[k] < bounds[k + 1]]
        is_whole = len(parts) == 1
        found += [
            Shard(name, part_owner) if is_whole else Shard(name, part_owner, dimension, first, last)
            for part_owner, first, last in parts
        ]
        position, owner = end, owner + len(cuts)
    return found


def _sliced_dimension(shape: Sequence[int]) -> int:
    """0, the rows, for matrices and tables (gradients may be sparse); else the last, the output channels."""
    return 0 if len(shape) <= 2 else len(shape) - 1


def _largest_first(sizes: Mapping[str, int], num_owners: int) -> list[Shard]:
    owned = [0] * num_owners
    owners = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = owned.index(min(owned))
        owned[owners[name]] += sizes[name]
    return [Shard(name, owners[name]) for name in sizes]
