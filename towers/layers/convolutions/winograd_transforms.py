"""The transforms of Winograd's F(4x4, 3x3) along one direction of images, as [n, length, rest].

Outputs are A' applied to the products of the transformed kernel and B' applied to the images' tiles
(`winograd.py`):

    B' =  4  0 -5  0  1  0      A' =  1  1  1  1  1  0      points  0
          0 -4 -4  1  1  0            0  1 -1  2 -2  0              1
          0  4 -4 -1  1  0            0  1  1  4  4  0             -1
          0 -2 -1  2  1  0            0  1 -1  8 -8  1              2
          0  2 -1 -2  1  0                                         -2
          0  4  0 -5  0  1                                         infinity

Rows of B', and columns of A', of a point and of its negative differ in the sign of every other number, so they
share two sums.
"""

from collections.abc import Sequence

import tensorflow as tf

# Number of outputs of a tile in each direction, and of the inputs that they need.
OUTPUTS, INPUTS = 4, 6


def cut(x: tf.Tensor) -> tf.Tensor:
    """[n, 4 T, rest] to [6, n, T, rest]: B' of each 4 numbers, with the number before and the one after them."""
    first, second, third, fourth = _fourths(x)
    before, after = _later(fourth), _earlier(first)
    even, odd = fourth - 4 * second, third - 4 * first
    wide, far = fourth - second, 2 * (third - first)
    return tf.stack(
        [
            4 * (before - second) + wide,
            even + odd,
            even - odd,
            wide + far,
            wide - far,
            after - third - 2 * far,
        ]
    )


def join(products: tf.Tensor) -> tf.Tensor:
    """[6, n, T, rest] to [n, 4 T, rest]: A' of each 6 products."""
    zero, ones, twos, one, two, infinity = _sums_and_differences(products)
    return _interleaved([zero + ones + twos, one + two, ones + 4 * twos, one + 4 * two + infinity])


def join_gradient(upstream: tf.Tensor) -> tf.Tensor:
    """[n, 4 T, rest] to [6, n, T, rest]: the gradient of `join`."""
    first, second, third, fourth = _fourths(upstream)
    even, odd = first + third, second + fourth
    wide, far = first + 4 * third, 2 * (second + 4 * fourth)
    return tf.stack([first, even + odd, even - odd, wide + far, wide - far, fourth])


def _sums_and_differences(by_point: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Of the numbers of each point: 0's, the sums of 1's and -1's and of 2's and -2's, the first two's difference,
    twice the others', and infinity's."""
    zero, one, minus_one, two, minus_two, infinity = tf.unstack(by_point)
    return zero, one + minus_one, two + minus_two, one - minus_one, 2 * (two - minus_two), infinity


def _fourths(x: tf.Tensor) -> list[tf.Tensor]:
    """[n, 4 T, rest] to 4 of [n, T, rest]: every fourth number, from the first, the second, ..."""
    _, length, rest = x.shape
    return tf.unstack(tf.reshape(x, [-1, length // OUTPUTS, OUTPUTS, rest]), axis=2)


def _interleaved(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """The inverse of `_fourths`."""
    _, count, rest = parts[0].shape
    return tf.reshape(tf.stack(parts, 2), [-1, len(parts) * count, rest])


def _later(part: tf.Tensor) -> tf.Tensor:
    """[n, T, rest]: each number moved one index later, after a zero."""
    return tf.pad(part[:, :-1], [[0, 0], [1, 0], [0, 0]])


def _earlier(part: tf.Tensor) -> tf.Tensor:
    return tf.pad(part[:, 1:], [[0, 0], [0, 1], [0, 0]])
