"""The smallest network: one convolution and the logits. For trying out a cluster, and for measuring an exchange.

At 32x32x3 and 10 classes: 5,346 parameters, 18,944 multiply-adds.
"""

import keras
from keras import layers

from models.networks.logits import logits_layer


def tiny(*, image_shape: tuple[int, int, int] = (32, 32, 3), num_classes: int = 10) -> keras.Model:
    """Builds the network: float32 images [N, H, W, C] to float32 logits [N, num_classes]."""
    images = layers.Input(image_shape, name="images")
    x = layers.Conv2D(8, 3, strides=4, padding="same", use_bias=False, name="conv")(images)
    x = layers.Flatten()(layers.ReLU()(x))
    return keras.Model(images, logits_layer(num_classes)(x), name="tiny")
