"""AlexNet scaled for 32x32: the widths of Krizhevsky 2014 (one tower), smaller kernels and strides.

    conv1   5x5x64,  stride 1, ReLU -> pool 3x3/2     32x32 -> 16x16    (11x11, stride 4 at 224x224)
    conv2   5x5x192, ReLU           -> pool 3x3/2     16x16 ->  8x8
    conv3   3x3x384, ReLU                              8x8
    conv4   3x3x256, ReLU                              8x8
    conv5   3x3x256, ReLU           -> pool 3x3/2      8x8  ->  4x4
    dense1  1024, ReLU, dropout 0.5                                     (4096 at 224x224)
    dense2  1024, ReLU, dropout 0.5                                     (4096 at 224x224)
    logits  num_classes

At 32x32x3 and 10 classes: 7,706,442 parameters, 225,650,688 multiply-adds.
Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997;
as there, without local response normalisation.
"""

import keras
from keras import layers

from models.networks.logits import logits_layer

# (filters, kernel size, followed by a pool)
CONVOLUTIONS = ((64, 5, True), (192, 5, True), (384, 3, False), (256, 3, False), (256, 3, True))
DENSE_UNITS = (1024, 1024)
DROPOUT_RATE = 0.5


def alexnet(*, image_shape: tuple[int, int, int] = (32, 32, 3), num_classes: int = 10) -> keras.Model:
    """Builds the network: float32 images [N, H, W, C] to float32 logits [N, num_classes]."""
    x = images = layers.Input(image_shape, name="images")
    for number, (filters, size, pooled) in enumerate(CONVOLUTIONS, start=1):
        x = _conv(x, filters, size, f"conv{number}")
        if pooled:
            # "same", so that an image of any size passes.
            x = layers.MaxPooling2D(3, 2, padding="same")(x)
    x = layers.Flatten()(x)
    for number, units in enumerate(DENSE_UNITS, start=1):
        name = f"dense{number}"
        x = layers.Dense(units, activation="relu", kernel_initializer="he_normal", name=name)(x)
        x = layers.Dropout(DROPOUT_RATE, name=f"{name}_dropout")(x)
    logits = logits_layer(num_classes)(x)
    return keras.Model(images, logits, name="alexnet")


def _conv(x: keras.KerasTensor, filters: int, size: int, name: str) -> keras.KerasTensor:
    conv = layers.Conv2D(
        filters, size, padding="same", activation="relu", kernel_initializer="he_normal", name=name
    )
    return conv(x)
