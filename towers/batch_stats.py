"""How the states that the towers return become one state: moving statistics of batch norm and the like.

The same formula in every mode, whether the towers are in one process or in several:

    average        state + sum_i(w_i * (new_i - state)) / sum_i(w_i)     w_i: weight of tower i's examples
    first, synced  the state of tower 0

A constant (frozen statistics, a Normalization layer) has only changes of 0, so it stays the same to the bit.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.errors import UserError
from towers.packing import joined, packs, parted

# With 'synced' the towers exchange statistics inside the forward pass, so all return the same state.
POLICIES = ("average", "first", "synced")
# Statistics are small and many, so they are packed into vectors. Large variables (frozen weights) stay alone:
# they gain nothing from a copy.
_PACK_BYTES = 1 << 16


def check_batch_stats(name: str) -> None:
    """Raises UserError for a name that is not in POLICIES."""
    if name not in POLICIES:
        raise UserError(f"batch_stats={name!r} is unknown: use one of {', '.join(POLICIES)}")


def combined(
    old: Sequence[tf.Tensor], new: Sequence[Sequence[tf.Tensor]], weights: Sequence[tf.Tensor], batch_stats: str
) -> list[tf.Tensor]:
    """The state after the passes of all towers of one process; exactly `old` where no tower changed it.

    Args:
      old: the state before.
      new: each tower's state, in the same order.
      weights: float32 scalars, the weight of each tower's examples.
      batch_stats: one of POLICIES.
    """
    found = list(new[0])
    averaged = [index for index, by_weight in enumerate(_averaged(old, batch_stats)) if by_weight]
    for dtype in dict.fromkeys(old[index].dtype for index in averaged):
        indices = [index for index in averaged if old[index].dtype == dtype]
        sizes = [old[index].shape.num_elements() * dtype.size for index in indices]
        for pack in packs(sizes, _PACK_BYTES):
            chosen = [indices[position] for position in pack]
            before = joined([old[index] for index in chosen])
            after = [joined([of_tower[index] for index in chosen]) for of_tower in new]
            value = _combined_vector(before, after, weights)
            for index, part in zip(chosen, parted(value, [old[index] for index in chosen]), strict=True):
                found[index] = part
    return found


def _combined_vector(old, new, weights):
    per_tower = [
        changes([old], [of_tower], weight, is_first=False, batch_stats="average")
        for of_tower, weight in zip(new, weights, strict=True)
    ]
    # Weights are summed in the state's precision: a float32 sum would be less exact than a float64 state.
    total = tf.add_n([tf.cast(weight, old.dtype) for weight in weights])
    (value,) = changed([old], [tf.add_n([change for (change,) in per_tower])], total, batch_stats="average")
    return value


def changes(
    old: Sequence[tf.Tensor],
    new: Sequence[tf.Tensor],
    weight: tf.Tensor,
    *,
    is_first: tf.Tensor | bool,
    batch_stats: str,
) -> list[tf.Tensor]:
    """What one tower, replica or process adds to the sum that `changed` takes.

    Args:
      old: the state before, the same everywhere.
      new: this tower's, replica's or process's state.
      weight: float32 scalar, the weight of its examples.
      is_first: whether it is, or contains, tower 0.
      batch_stats: one of POLICIES.
    """
    return [
        _change(before, after) * tf.cast(weight if by_weight else is_first, before.dtype)
        for before, after, by_weight in zip(old, new, _averaged(old, batch_stats), strict=True)
    ]


def _change(before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
    # Infinity minus infinity, in a mask that is a frozen weight, would be NaN.
    return tf.where(tf.equal(after, before), tf.zeros_like(before), after - before)


def changed(
    old: Sequence[tf.Tensor], summed: Sequence[tf.Tensor], weight: tf.Tensor, batch_stats: str
) -> list[tf.Tensor]:
    """The state after the passes of all towers.

    Args:
      old: the state before.
      summed: the sums of all `changes`.
      weight: scalar, the sum of all weights. If it is 0, only stand-ins were computed: the state is unchanged.
      batch_stats: one of POLICIES.
    """
    return [
        before + (_quotient(change, weight) if by_weight else _if_any(change, weight))
        for before, change, by_weight in zip(old, summed, _averaged(old, batch_stats), strict=True)
    ]


def _quotient(change: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(change, tf.cast(weight, change.dtype))


def _if_any(change: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """The change of tower 0, or zeros if there was no example at all. Integers are multiplied, never divided."""
    return change * tf.cast(tf.sign(weight), change.dtype)


def _averaged(state: Sequence[tf.Tensor], batch_stats: str) -> list[bool]:
    """Which variables are averaged by weight. Integers have no average: they are tower 0's."""
    return [batch_stats == "average" and value.dtype.is_floating for value in state]
