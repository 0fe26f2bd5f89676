"""Uniform numbers as hashes of counters: each is computed on its own, and is the same on every machine."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_GAMMA = 0x9E3779B97F4A7C15  # of SplitMix64: 2**64 divided by the golden ratio, odd


def uniform_numbers(seeds: Sequence[int], counters: tf.Tensor) -> tf.Tensor:
    """Uniform numbers in [0, 1), float64: multiples of 2**-53.

    Column j holds element `counter` of the SplitMix64 sequence of seed j (Steele, Lea and Flood 2014).

    Args:
      seeds: one for each column.
      counters: int64 [n, columns], or [n, 1] for the same counter in all columns.
    """
    shift, xor = tf.bitwise.right_shift, tf.bitwise.bitwise_xor
    first = tf.constant(np.array([[(seed + _GAMMA) % 2**64 for seed in seeds]], np.uint64))
    state = first + tf.bitcast(counters, tf.uint64) * _word(_GAMMA)
    state = xor(state, shift(state, _word(30))) * _word(0xBF58476D1CE4E5B9)
    state = xor(state, shift(state, _word(27))) * _word(0x94D049BB133111EB)
    state = xor(state, shift(state, _word(31)))
    return tf.cast(tf.bitcast(shift(state, _word(11)), tf.int64), tf.float64) * 2.0**-53


def _word(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
