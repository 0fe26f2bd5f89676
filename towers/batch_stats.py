"""What becomes of the state the towers hand back: the moving statistics of batch norm and their like."""

from collections.abc import Sequence

import tensorflow as tf

from towers.errors import UserError
from towers.packing import joined, packs, parted

# Statistics are small and many; what is larger (frozen weights) gains nothing by being copied into one vector.
_PACK_BYTES = 1 << 16


def average(
    old: Sequence[tf.Tensor], new: Sequence[Sequence[tf.Tensor]], weights: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The towers' values averaged by their weights; exactly `old` where no tower changed it.

    Integers, which have no average, are the first tower's.

    Args:
      old: the state before.
      new: each tower's, in the same order.
      weights: float32 scalars, a tower each.
    """
    found = list(new[0])
    kinds = sorted({value.dtype.name for value in old if value.dtype.is_floating})
    for kind in kinds:
        places = [place for place, value in enumerate(old) if value.dtype.name == kind]
        # In the state's own type: a quotient of float32 weights would be the least exact number in float64.
        own = [tf.cast(weight, kind) for weight in weights]
        total = tf.add_n(own)
        shares = [tf.math.divide_no_nan(weight, total) for weight in own]
        sizes = [old[place].shape.num_elements() * old[place].dtype.size for place in places]
        for pack in packs(sizes, _PACK_BYTES):
            chosen = [places[number] for number in pack]
            averaged = _averaged(
                [old[place] for place in chosen], [[of_one[place] for place in chosen] for of_one in new], shares
            )
            for place, value in zip(chosen, averaged, strict=True):
                found[place] = value
    return found


def _averaged(old, new, shares):
    """Tensors of one dtype, as one vector."""
    before = joined(old)
    changes = [(joined(of_one) - before) * share for of_one, share in zip(new, shares, strict=True)]
    return parted(before + tf.add_n(changes), old)


def first(
    old: Sequence[tf.Tensor], new: Sequence[Sequence[tf.Tensor]], weights: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The first tower's values: the classic way, which looks at a part of the batch."""
    return list(new[0])


# Where statistics are exchanged inside the towers, all hand back the same: the first is as good as any.
COMBINATIONS = {"average": average, "first": first, "synced": first}


def check_batch_stats(name: str) -> None:
    """Raises UserError for a name that is not in COMBINATIONS."""
    if name not in COMBINATIONS:
        raise UserError(f"batch_stats={name!r} is unknown: use one of {', '.join(COMBINATIONS)}")
