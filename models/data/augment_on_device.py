"""Crops and flips on a tower's device: `models.data.augment.crop_flip` in operations that GPUs have kernels for.

TensorFlow 2.21 has no GPU kernel that gathers uint8, and computes int32 on the host. So pixels are gathered in
float16, which holds 0 to 255 exactly, and positions are int64.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from models.data.augment import PADDING, CropFlip


class RawImages(NamedTuple):
    """The images of a batch as the host sends them to a device.

    Attributes:
      images: uint8 [N, H, W, C].
      draws: how they are cropped and flipped, with int64 `rows` and `columns`; () to leave them unchanged.
    """

    images: tf.Tensor
    draws: CropFlip | tuple[()] = ()

    @classmethod
    def of(cls, images: tf.Tensor, draws: CropFlip | tuple[()] = ()) -> "RawImages":
        """Raw images from the draws that `models.data.augment.draw_crop_flip` returns."""
        if not draws:
            return cls(images)
        return cls(
            images, CropFlip(tf.cast(draws.rows, tf.int64), tf.cast(draws.columns, tf.int64), draws.mirrored)
        )


def crop_flip_on_device(
    images: tf.Tensor, draws: CropFlip, padding: int = PADDING, fill: str = "black"
) -> tf.Tensor:
    """`models.data.augment.crop_flip` on a device, with `RawImages.draws`: uint8 [N, H, W, C] to float16."""
    height, width, channels = images.shape[1:]
    rows = draws.rows[:, None] + _positions(height, padding)
    forwards = _positions(width, padding)
    columns = draws.columns[:, None] + tf.where(draws.mirrored[:, None], forwards[::-1], forwards)
    chosen = (_inside(rows, height, fill) * width)[:, :, None] + _inside(columns, width, fill)[:, None, :]
    pixels = tf.cast(tf.reshape(images, [-1, height * width, channels]), tf.float16)
    found = tf.gather(pixels, chosen, batch_dims=1)
    if fill == "black":
        visible = _is_inside(rows, height)[:, :, None] & _is_inside(columns, width)[:, None, :]
        found = tf.where(visible[..., None], found, tf.zeros([], found.dtype))
    return tf.ensure_shape(found, [None, height, width, channels])


def _positions(length: int, padding: int) -> tf.Tensor:
    """Positions in the image of a crop that begins where the padding begins."""
    return tf.constant(np.arange(length) - padding, tf.int64)


def _is_inside(positions: tf.Tensor, length: int) -> tf.Tensor:
    return (positions >= 0) & (positions < length)


def _inside(positions: tf.Tensor, length: int, fill: str) -> tf.Tensor:
    """Positions within the image: reflected at its borders, or for 'black' clipped to them (then painted over)."""
    if fill == "reflect":
        positions = tf.abs(positions)
        return tf.minimum(positions, 2 * (length - 1) - positions)
    return tf.clip_by_value(positions, 0, length - 1)
