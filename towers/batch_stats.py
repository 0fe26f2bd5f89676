"""What becomes of the state the towers hand back: the moving statistics of batch norm and their like."""

from collections.abc import Sequence

import tensorflow as tf

from towers.errors import UserError


def average(old: tf.Tensor, new: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> tf.Tensor:
    """The towers' values averaged by their weights; exactly `old` where no tower changed it.

    Integers, which have no average, are the first tower's.
    """
    if not old.dtype.is_floating:
        return new[0]
    # In the state's own type: a quotient of float32 weights would be the least exact number in float64.
    weights = [tf.cast(weight, old.dtype) for weight in weights]
    total = tf.add_n(weights)
    changes = [
        (value - old) * tf.math.divide_no_nan(weight, total) for value, weight in zip(new, weights, strict=True)
    ]
    return old + tf.add_n(changes)


def first(old: tf.Tensor, new: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> tf.Tensor:
    """The first tower's value: the classic way, which looks at a part of the batch."""
    return new[0]


# Where statistics are exchanged inside the towers, all hand back the same: the first is as good as any.
COMBINATIONS = {"average": average, "first": first, "synced": first}


def check_batch_stats(name: str) -> None:
    """Raises UserError for a name that is not in COMBINATIONS."""
    if name not in COMBINATIONS:
        raise UserError(f"batch_stats={name!r} is unknown: use one of {', '.join(COMBINATIONS)}")
