"""Transposed matrices of 16-bit numbers, by pairs of rows as words of 32 bits.

    rows 2 i and 2 i + 1   [N, M]   -->   words [N / 2, M]   -->   transposed [M, N / 2]   ==   [M, N] numbers
                                   one loop               oneDNN                      the same bytes

oneDNN transposes words of 32 bits in vectors, numbers of 16 bits one by one: 64 x 8192 words take 0.08 ms, 128 x
8192 numbers 1.05; with the loop 0.35 (AMD EPYC, Zen 4, one thread).
"""

import numpy as np
import tensorflow as tf

_HALF = np.uint32(16)


def transposed(rows: tf.Tensor) -> tf.Tensor:
    """[N, M] as [M, N].

    Args:
      rows: bfloat16 or float16, M known; TensorFlow transposes other dtypes. If N is odd, the last row is paired
        with zeros, which costs a copy of the rows and one of the result.
    """
    if rows.dtype.size != 2:
        return tf.transpose(rows)
    num_rows, length = tf.shape(rows)[0], rows.shape[1]
    even = tf.pad(rows, [[0, num_rows % 2], [0, 0]])  # No copy if N is even.
    words = _words(tf.reshape(tf.bitcast(even, tf.uint16), [-1, 2, length]))
    numbers = tf.bitcast(tf.transpose(tf.bitcast(words, tf.float32)), rows.dtype)
    return tf.reshape(numbers, [length, -1])[:, :num_rows]


@tf.function(jit_compile=True, autograph=False, input_signature=[tf.TensorSpec([None, 2, None], tf.uint16)])
def _words(pairs):
    """Words [N / 2, M]; the lower halves are the numbers of the first row of each pair."""
    first, second = tf.unstack(tf.cast(pairs, tf.uint32), axis=1)
    return tf.bitwise.bitwise_or(first, tf.bitwise.left_shift(second, _HALF))
