"""Which gradients travel together. A collective has a cost of its own, so small tensors share one.

The backward pass gives the last layers' gradients first. Packs are therefore filled from the end: the first is
on its way while the rest is still being computed. With at most 8 bytes a pack:

    tensor    0   1   2   3   4
    bytes     4   4   2   6   3        packs: (4) (3 2) (1 0)
"""

from collections.abc import Sequence

import tensorflow as tf


def packs(sizes_bytes: Sequence[int], bytes_per_pack: int) -> list[tuple[int, ...]]:
    """Places of the tensors in each pack, last tensors first. One that is larger than a pack is alone in one."""
    found: list[tuple[int, ...]] = []
    room = 0
    for place in reversed(range(len(sizes_bytes))):
        if found and sizes_bytes[place] <= room:
            found[-1] += (place,)
        else:
            found.append((place,))
            room = bytes_per_pack
        room -= sizes_bytes[place]
    return found


def joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """One vector of all the tensors' numbers, which have one dtype."""
    vectors = [tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1]) for tensor in tensors]
    return tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]


def parted(vector: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors of a `joined` vector, with the shapes of `like`."""
    parts = [vector] if len(like) == 1 else tf.split(vector, [tensor.shape.num_elements() for tensor in like])
    return [
        part if tensor.shape.rank == 1 else tf.reshape(part, tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]
