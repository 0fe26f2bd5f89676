"""The classic CIFAR network of the TensorFlow tutorial `cifar10.py`.

    conv1   5x5x64, ReLU -> pool 3x3/2 -> local response normalisation     32x32 -> 16x16
    conv2   5x5x64, ReLU -> local response normalisation -> pool 3x3/2     16x16 ->  8x8
    dense1  384, ReLU
    dense2  192, ReLU
    logits  num_classes

At 32x32x3 and 10 classes: 1,756,426 parameters, 32,778,112 multiply-adds.
The tutorial draws kernels from narrow truncated normals; here they are he_normal, as in the other networks.
"""

import keras
from keras import layers

from models.networks.local_response import local_response_normalization
from models.networks.logits import logits_layer


def classic_cnn(*, image_shape: tuple[int, int, int] = (32, 32, 3), num_classes: int = 10) -> keras.Model:
    """Builds the network: float32 images [N, H, W, C] to float32 logits [N, num_classes]."""
    images = layers.Input(image_shape, name="images")
    x = local_response_normalization(_pool(_conv(images, "conv1")))
    x = _pool(local_response_normalization(_conv(x, "conv2")))
    x = layers.Flatten()(x)
    x = layers.Dense(384, activation="relu", kernel_initializer="he_normal", name="dense1")(x)
    x = layers.Dense(192, activation="relu", kernel_initializer="he_normal", name="dense2")(x)
    logits = logits_layer(num_classes)(x)
    return keras.Model(images, logits, name="classic_cnn")


def _conv(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
    conv = layers.Conv2D(64, 5, padding="same", activation="relu", kernel_initializer="he_normal", name=name)
    return conv(x)


def _pool(x: keras.KerasTensor) -> keras.KerasTensor:
    # "same", so that an image of any size passes.
    return layers.MaxPooling2D(3, 2, padding="same")(x)
