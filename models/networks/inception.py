"""A small Inception for 32x32: the nine blocks of GoogLeNet at half width, batch norm after each convolution.

    stem    3x3x32, 3x3x96  -> pool 3x3/2     32x32 -> 16x16
    3a 3b   blocks          -> pool 3x3/2     16x16 ->  8x8
    4a-4e   blocks          -> pool 3x3/2      8x8  ->  4x4
    5a 5b   blocks                             4x4
    logits  global average pool, dropout 0.4, num_classes

    block:  x -+- 1x1 ----------------------+
               +- 1x1 reduce - 3x3 ---------+- join channels
               +- 1x1 reduce - 3x3 - 3x3 ---+
               +- max pool 3x3/1 - 1x1 -----+

The 5x5 convolution is two of 3x3, as in Ioffe and Szegedy 2015 (arXiv:1502.03167, appendix).
No auxiliary classifiers. At 32x32x3 and 10 classes: 1,573,386 parameters, 123,978,752 multiply-adds.
Widths: half of table 1 of Szegedy et al. 2014 (arXiv:1409.4842).
"""

from typing import NamedTuple

import keras
from keras import layers

from models.networks.logits import logits_layer


class Branches(NamedTuple):
    """Filters of the convolutions of one block, named as in table 1 of the paper."""

    direct: int
    reduce3: int
    conv3: int
    reduce5: int
    conv5: int
    pooled: int


STEM_FILTERS = (32, 96)
# The blocks between two pools, by block name.
STAGES = (
    {"3a": Branches(32, 48, 64, 8, 16, 16), "3b": Branches(64, 64, 96, 16, 48, 32)},
    {
        "4a": Branches(96, 48, 104, 8, 24, 32),
        "4b": Branches(80, 56, 112, 12, 32, 32),
        "4c": Branches(64, 64, 128, 12, 32, 32),
        "4d": Branches(56, 72, 144, 16, 32, 32),
        "4e": Branches(128, 80, 160, 16, 64, 64),
    },
    {"5a": Branches(128, 80, 160, 16, 64, 64), "5b": Branches(192, 96, 192, 24, 64, 64)},
)
DROPOUT_RATE = 0.4


def inception(*, image_shape: tuple[int, int, int] = (32, 32, 3), num_classes: int = 10) -> keras.Model:
    """Builds the network: float32 images [N, H, W, C] to float32 logits [N, num_classes]."""
    x = images = layers.Input(image_shape, name="images")
    for number, filters in enumerate(STEM_FILTERS, start=1):
        x = _conv_norm_relu(x, filters, 3, f"stem_conv{number}")
    for blocks in STAGES:
        # "same", so that an image of any size passes.
        x = layers.MaxPooling2D(3, 2, padding="same")(x)
        for name, branches in blocks.items():
            x = _block(x, branches, f"block{name}")
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dropout(DROPOUT_RATE, name="dropout")(x)
    logits = logits_layer(num_classes)(x)
    return keras.Model(images, logits, name="inception")


def _block(x: keras.KerasTensor, filters: Branches, name: str) -> keras.KerasTensor:
    """Concatenates four branches of [N, H, W, C] along the channels; H and W do not change."""
    direct = _conv_norm_relu(x, filters.direct, 1, f"{name}_direct")
    branch3 = _conv_norm_relu(x, filters.reduce3, 1, f"{name}_reduce3")
    branch3 = _conv_norm_relu(branch3, filters.conv3, 3, f"{name}_conv3")
    branch5 = _conv_norm_relu(x, filters.reduce5, 1, f"{name}_reduce5")
    branch5 = _conv_norm_relu(branch5, filters.conv5, 3, f"{name}_conv5_first")
    branch5 = _conv_norm_relu(branch5, filters.conv5, 3, f"{name}_conv5_second")
    pooled = layers.MaxPooling2D(3, 1, padding="same")(x)
    pooled = _conv_norm_relu(pooled, filters.pooled, 1, f"{name}_pooled")
    return layers.Concatenate()([direct, branch3, branch5, pooled])


def _conv_norm_relu(x: keras.KerasTensor, filters: int, size: int, name: str) -> keras.KerasTensor:
    # No bias: the norm would cancel it.
    conv = layers.Conv2D(filters, size, padding="same", use_bias=False, kernel_initializer="he_normal", name=name)
    # Momentum 0.9, not Keras's 0.99, so that the averages are usable after a few hundred steps.
    norm = layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")
    return layers.ReLU()(norm(conv(x)))
