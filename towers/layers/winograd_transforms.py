"""The transforms of Winograd's F(4x4, 3x3) along one direction of images, as [n, length, rest].

Outputs are A' of the products of B' of the images' tiles and of the kernel's (`winograd.py`).
"""

from collections.abc import Sequence

import tensorflow as tf

# Outputs of a tile in each direction; the inputs that they need.
OUTPUTS, INPUTS = 4, 6
_IMAGE_TRANSFORM = (  # B'
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
_OUTPUT_TRANSFORM = (  # A'
    (1, 1, 1, 1, 1, 0),
    (0, 1, -1, 2, -2, 0),
    (0, 1, 1, 4, 4, 0),
    (0, 1, -1, 8, -8, 1),
)


def cut(x: tf.Tensor) -> tf.Tensor:
    """[n, 4 T, rest] to [6, n, T, rest]: B' of 4 numbers, the one before and the one after them."""
    first, second, third, fourth = _fourths(x)
    return tf.stack(_combined(_IMAGE_TRANSFORM, [_later(fourth), first, second, third, fourth, _earlier(first)]))


def cut_gradient(upstream: tf.Tensor) -> tf.Tensor:
    """[6, n, T, rest] to [n, 4 T, rest]."""
    before, first, second, third, fourth, after = _combined(_transposed(_IMAGE_TRANSFORM), tf.unstack(upstream))
    return _interleaved([first + _later(after), second, third, fourth + _earlier(before)])


def join(products: tf.Tensor) -> tf.Tensor:
    """[6, n, T, rest] to [n, 4 T, rest]: A' of each 6 products."""
    return _interleaved(_combined(_OUTPUT_TRANSFORM, tf.unstack(products)))


def join_gradient(upstream: tf.Tensor) -> tf.Tensor:
    """[n, 4 T, rest] to [6, n, T, rest]."""
    return tf.stack(_combined(_transposed(_OUTPUT_TRANSFORM), _fourths(upstream)))


def _fourths(x: tf.Tensor) -> list[tf.Tensor]:
    """[n, 4 T, rest] to 4 of [n, T, rest]: every fourth number, from the first, the second, ..."""
    _, length, rest = x.shape
    return tf.unstack(tf.reshape(x, [-1, length // OUTPUTS, OUTPUTS, rest]), axis=2)


def _interleaved(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """The inverse of `_fourths`."""
    _, count, rest = parts[0].shape
    return tf.reshape(tf.stack(parts, 2), [-1, len(parts) * count, rest])


def _later(part: tf.Tensor) -> tf.Tensor:
    """[n, T, rest]: each number one place later, behind a zero."""
    return tf.pad(part[:, :-1], [[0, 0], [1, 0], [0, 0]])


def _earlier(part: tf.Tensor) -> tf.Tensor:
    return tf.pad(part[:, 1:], [[0, 0], [0, 1], [0, 0]])


def _combined(matrix: Sequence[Sequence[int]], parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """matrix @ parts, without multiplications by 0 and 1."""
    return [sum(_times(factor, part) for factor, part in zip(row, parts, strict=True) if factor) for row in matrix]


def _times(factor: int, part: tf.Tensor) -> tf.Tensor:
    return part if factor == 1 else factor * part


def _transposed(matrix: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return list(zip(*matrix, strict=True))
