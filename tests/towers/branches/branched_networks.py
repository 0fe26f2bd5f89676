"""Small networks with branches, for tests."""

from collections.abc import Sequence

import keras
from keras import layers

from tests.towers.tiny_tasks import NUM_CLASSES


def conv_norm_relu(x: keras.KerasTensor, filters: int, size: int, name: str) -> keras.KerasTensor:
    """A convolution without bias, its batch norm and a ReLU."""
    x = layers.Conv2D(filters, size, padding="same", use_bias=False, name=name)(x)
    x = layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    return layers.ReLU(name=f"{name}_relu")(x)


def inception_block(x: keras.KerasTensor, name: str, dropout: float = 0.2) -> keras.KerasTensor:
    """A 1x1 convolution, two convolutions, a pool with dropout behind it, and a skip connection."""
    direct = conv_norm_relu(x, 4, 1, f"{name}_direct")
    deep = conv_norm_relu(conv_norm_relu(x, 3, 1, f"{name}_reduce"), 5, 3, f"{name}_conv")
    pooled = layers.MaxPooling2D(3, 1, padding="same", name=f"{name}_pool")(x)
    pooled = layers.Dropout(dropout, name=f"{name}_dropped")(conv_norm_relu(pooled, 3, 1, f"{name}_pooled"))
    return layers.Concatenate(name=f"{name}_join")([direct, deep, pooled, x])


def small_inception(num_classes: int = NUM_CLASSES, blocks: Sequence[str] = ("a", "b")) -> keras.Model:
    """Blocks on 6x6x3 images. Of a block's branches `deep` has most parameters, then `direct`, then `pooled`."""
    x = images = layers.Input((6, 6, 3), name="images")
    x = conv_norm_relu(x, 4, 3, "stem")
    for name in blocks:
        x = inception_block(x, name)
    x = layers.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(images, layers.Dense(num_classes, name="logits")(x))


def branches_by_block(blocks) -> list[tuple[str, list[list[str]]]]:
    """For each block its join, and the operations of those of its branches that move."""
    return [
        (
            block.join,
            [[node.operation.name for node in branch.nodes] for branch in block.branches if branch.moves],
        )
        for block in blocks
    ]
