"""Residual networks for 32x32: He, Zhang, Ren and Sun 2015 (arXiv:1512.03385), section 4.2.

    stem    3x3x16, batch norm, ReLU          32x32
    stage1  n blocks of 2 x (3x3x16)          32x32
    stage2  n blocks of 2 x (3x3x32)          16x16, the first convolution with stride 2
    stage3  n blocks of 2 x (3x3x64)           8x8,  the first convolution with stride 2
    logits  global average pool, num_classes

    block:  x -> conv -> norm -> ReLU -> conv -> norm -> (+ x) -> ReLU          depth = 6n + 2

Where the shape changes, the shortcut is a 1x1 convolution with stride 2 (option B) without batch norm
(section 4.2 itself uses option A, without a projection). Convolutions have no bias.
At 32x32x3 and 10 classes:

    resnet20     272,282 parameters   40,813,184 multiply-adds
    resnet32     466,714 parameters   69,124,736 multiply-adds
    resnet56     855,578 parameters  125,747,840 multiply-adds
    resnet110  1,730,522 parameters  253,149,824 multiply-adds
"""

import keras
from keras import layers

from models.networks.logits import logits_layer
from towers.errors import UserError

STAGE_FILTERS = (16, 32, 64)


def resnet(depth: int, *, image_shape: tuple[int, int, int] = (32, 32, 3), num_classes: int = 10) -> keras.Model:
    """Builds the network: float32 images [N, H, W, C] to float32 logits [N, num_classes].

    Raises:
      UserError: `depth` is not 6n + 2 with n at least 1.
    """
    num_blocks = _blocks_per_stage(depth)
    images = layers.Input(image_shape, name="images")
    x = layers.ReLU()(_conv_norm(images, STAGE_FILTERS[0], "stem"))
    for stage, filters in enumerate(STAGE_FILTERS, start=1):
        for number in range(1, num_blocks + 1):
            shrinks = stage > 1 and number == 1
            x = _block(x, filters, f"stage{stage}_block{number}", stride=2 if shrinks else 1)
    x = layers.GlobalAveragePooling2D()(x)
    logits = logits_layer(num_classes)(x)
    return keras.Model(images, logits, name=f"resnet{depth}")


def _blocks_per_stage(depth: int) -> int:
    """n in depth = 6n + 2: three stages of n blocks of two convolutions, plus the stem and the logits."""
    num_blocks, rest = divmod(depth - 2, 6)
    if rest or num_blocks < 1:
        nearest = 6 * max(1, round((depth - 2) / 6)) + 2
        raise UserError(f"depth={depth}: must be 6n + 2 with n at least 1; use depth={nearest}")
    return num_blocks


def _block(x: keras.KerasTensor, filters: int, name: str, *, stride: int) -> keras.KerasTensor:
    residual = layers.ReLU()(_conv_norm(x, filters, f"{name}_conv1", stride=stride))
    residual = _conv_norm(residual, filters, f"{name}_conv2")
    if stride != 1:
        x = _conv(x, filters, f"{name}_shortcut", size=1, stride=stride)
    return layers.ReLU()(layers.Add()([residual, x]))


def _conv_norm(x: keras.KerasTensor, filters: int, name: str, *, stride: int = 1) -> keras.KerasTensor:
    # Momentum 0.9, not Keras's 0.99, so that the averages are usable after a few hundred steps.
    norm = layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")
    return norm(_conv(x, filters, name, size=3, stride=stride))


def _conv(x: keras.KerasTensor, filters: int, name: str, *, size: int, stride: int) -> keras.KerasTensor:
    conv = layers.Conv2D(
        filters,
        size,
        stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=name,
    )
    return conv(x)
