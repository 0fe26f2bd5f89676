"""Packs: small tensors that share one collective, because each collective has a fixed cost.

The backward pass computes the last layers' gradients first. So packs are filled from the end: the first pack is
sent while the other gradients are still computed. With at most 8 bytes a pack:

    tensor    0   1   2   3   4
    bytes     4   4   2   6   3        packs: (4) (3 2) (1 0)
"""

from collections.abc import Sequence

import tensorflow as tf


def packs(sizes_bytes: Sequence[int], bytes_per_pack: int) -> list[tuple[int, ...]]:
    """Indices of the tensors in each pack, last tensors first. A tensor larger than a pack has one for itself."""
    found: list[tuple[int, ...]] = []
    room = 0
    for index in reversed(range(len(sizes_bytes))):
        if found and sizes_bytes[index] <= room:
            found[-1] += (index,)
        else:
            found.append((index,))
            room = bytes_per_pack
        room -= sizes_bytes[index]
    return found


def joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """All elements of some tensors of one dtype as one vector."""
    vectors = [tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1]) for tensor in tensors]
    return tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]


def parted(vector: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The inverse of `joined`: tensors with the shapes of `like`."""
    parts = [vector] if len(like) == 1 else tf.split(vector, [tensor.shape.num_elements() for tensor in like])
    return [
        part if tensor.shape.rank == 1 else tf.reshape(part, tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]
