"""How the states that the towers return become one state: moving statistics of batch norm and the like.

The same formula in every mode, whether the towers are in one process or in several:

    average, synced  state + sum_i(w_i * (new_i - state)) / sum_i(w_i)     w_i: weight of tower i's examples
    first            the state of tower 0

State is a list with one tensor per variable. New state maps an index of that list to a value, for the variables
that a tower's pass changes (the same ones on all towers). Frozen weights, a Normalization layer and the like are
not in it and keep their values.
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from towers.errors import UserError
from towers.packing import joined, packs, parted

# With 'synced' the towers exchange statistics of batch norms inside the forward pass, so all return the same ones.
# The state of a custom layer, such as a mean of its inputs, still differs.
POLICIES = ("average", "first", "synced")
# Statistics are small and many, so they are packed into vectors. Large variables gain nothing from a copy.
_PACK_BYTES = 1 << 16


def check_batch_stats(name: str) -> None:
    """Raises UserError for a name that is not in POLICIES."""
    if name not in POLICIES:
        raise UserError(f"batch_stats={name!r} is unknown: use one of {', '.join(POLICIES)}")


def combined(
    old: Sequence[tf.Tensor],
    new: Sequence[Mapping[int, tf.Tensor]],
    weights: Sequence[tf.Tensor],
    batch_stats: str,
) -> dict[int, tf.Tensor]:
    """The new state after the passes of all towers of one process.

    Args:
      old: the state before.
      new: each tower's new state.
      weights: float32 scalars, the weight of each tower's examples.
      batch_stats: one of POLICIES.
    """
    found = dict(new[0])
    averaged = [index for index in found if is_averaged(old[index], batch_stats)]
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
        changes([old], {0: of_tower}, weight, is_first=False, batch_stats="average")[0]
        for of_tower, weight in zip(new, weights, strict=True)
    ]
    # Weights are summed in the state's precision: a float32 sum would be less exact than a float64 state.
    total = tf.add_n([tf.cast(weight, old.dtype) for weight in weights])
    return changed([old], {0: tf.add_n(per_tower)}, total, batch_stats="average")[0]


def changes(
    old: Sequence[tf.Tensor],
    new: Mapping[int, tf.Tensor],
    weight: tf.Tensor,
    *,
    is_first: tf.Tensor | bool,
    batch_stats: str,
) -> dict[int, tf.Tensor]:
    """What one tower, replica or process adds to the sum that `changed` takes.

    Args:
      old: the state before, the same everywhere.
      new: this tower's, replica's or process's new state.
      weight: float32 scalar, the weight of its examples.
      is_first: whether this is tower 0, or the replica or process that contains it.
      batch_stats: one of POLICIES.
    """
    found = {}
    for index, after in new.items():
        before = old[index]
        factor = weight if is_averaged(before, batch_stats) else is_first
        difference = change(before, after)
        found[index] = difference * tf.cast(factor, difference.dtype)
    return found


def change(before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
    """after - before: added to `before` it gives `after`. For booleans it is an integer."""
    before, after = _number(before), _number(after)
    # An infinity that stays infinite has the change 0: inf - inf would be NaN.
    return tf.where(tf.equal(after, before), tf.zeros_like(before), after - before)


def _number(value: tf.Tensor) -> tf.Tensor:
    """The value; 1 and 0 for booleans, which have neither sums nor differences."""
    return tf.cast(value, tf.int64) if value.dtype == tf.bool else value


def changed(
    old: Sequence[tf.Tensor], summed: Mapping[int, tf.Tensor], weight: tf.Tensor, batch_stats: str
) -> dict[int, tf.Tensor]:
    """The new state after the passes of all towers.

    Args:
      old: the state before.
      summed: the sums of all `changes`.
      weight: scalar, the sum of all weights. If it is 0, only stand-ins were computed: the state is unchanged.
      batch_stats: one of POLICIES.
    """
    found = {}
    for index, of_sum in summed.items():
        of_all = _quotient if is_averaged(old[index], batch_stats) else _if_any
        found[index] = tf.cast(_number(old[index]) + of_all(of_sum, weight), old[index].dtype)
    return found


def after(old: Sequence[tf.Tensor], new: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
    """All state after a pass: the new value of each variable that has one, otherwise the old value."""
    return [new.get(index, before) for index, before in enumerate(old)]


def _quotient(change: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(change, tf.cast(weight, change.dtype))


def _if_any(change: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """The change of tower 0, or zeros if there was no example at all. Integers are multiplied, never divided."""
    return change * tf.cast(tf.sign(weight), change.dtype)


def is_averaged(value: tf.Tensor | tf.Variable, batch_stats: str) -> bool:
    """Whether a variable is averaged by weight. Integers have no average: they take tower 0's value."""
    return averages(batch_stats) and value.dtype.is_floating


def averages(batch_stats: str) -> bool:
    """Whether the policy averages state over towers."""
    return batch_stats != "first"
