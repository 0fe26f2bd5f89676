"""Moving statistics of towers that compute several microbatches in one call, as if averaged after each microbatch.

On one device each microbatch m changes a statistic s, whose decay is a. With w[t, m] the weight of tower t's part
of it, and c[t, m] what this part adds:

    s <- a * s + sum_t(w[t, m] * c[t, m]) / W[m]        W[m] = sum_t(w[t, m]);  s stays if W[m] is 0

A pipeline's tower starts a microbatch before the other towers have finished the previous one. But training reads
no moving statistics, so only their values after the last microbatch matter. They are averaged over the towers by
their weights W_t = sum_m(w[t, m]), whose sum is W. So tower t takes, with n microbatches of W[m] > 0, l[m] of them
after m:

    s_t = a^n * s + sum_m(a^l[m] * c[t, m] * (w[t, m] / W[m]) / (W_t / W))
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf


class Microbatches(NamedTuple):
    """What a tower's microbatches add to moving statistics.

    Attributes:
      weights: float32 [microbatches], the weight of each one's examples.
      added: for each state variable that has a decay [microbatches, *shape]: new - decay * old.
    """

    weights: tf.Tensor
    added: list[tf.Tensor]


def after_all(
    old: Sequence[tf.Tensor],
    new: Mapping[int, tf.Tensor],
    own: Microbatches,
    totals: tf.Tensor,
    decays: Sequence[float | None],
    *,
    by_weight: bool,
) -> dict[int, tf.Tensor]:
    """A tower's new state after all microbatches, of which the average over the towers is one device's.

    Args:
      old: the state before, one tensor for each variable.
      new: the new state, by index.
      own: what this tower's microbatches add.
      totals: float32 [microbatches], the sums of all towers' weights.
      decays: the decay of each variable; None for one that is no moving statistic, whose value is that in `new`.
      by_weight: whether the towers' states are averaged by weight; otherwise one tower's state is used.
    """
    found, added = dict(new), iter(own.added)
    weights, totals = tf.cast(own.weights, tf.float64), tf.cast(totals, tf.float64)
    is_used = tf.sign(totals)
    left = tf.cumsum(is_used, exclusive=True, reverse=True)
    shares = is_used
    if by_weight:
        of_all = tf.math.divide_no_nan(tf.reduce_sum(totals), tf.reduce_sum(weights))
        shares = tf.math.divide_no_nan(weights, totals) * of_all

    @functools.cache
    def factors(decay: float, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """Factor of the old value, and factors [microbatches, 1] of what each microbatch adds."""
        of_added = (shares * decay**left)[:, tf.newaxis]
        return tf.cast(decay ** tf.reduce_sum(is_used), dtype), tf.cast(of_added, dtype)

    for index, decay in enumerate(decays):
        if decay is not None:
            of_old, of_added = factors(decay, old[index].dtype)
            found[index] = of_old * old[index] + tf.reduce_sum(of_added * next(added), 0)
    return found
