"""A small wide network that learns CIFAR-10 in few epochs, after Jordan 2024 (arXiv:2404.00498, "airbench94").

    whitening   2x2x24, GELU: the kernel is frozen (whitening.py computes it from images), the bias is trained
    block1      3x3x64,  2x2 max pool, norm, GELU, 3x3x64,  norm, GELU         31x31 -> 15x15
    block2      3x3x256, 2x2 max pool, norm, GELU, 3x3x256, norm, GELU         15x15 ->  7x7
    block3      3x3x256, 2x2 max pool, norm, GELU, 3x3x256, norm, GELU          7x7  ->  3x3
    logits      global max pool, num_classes without bias, divided by 9

Batch norms have a bias and no scale. Initially output channel k of a 3x3 convolution equals input channel k, for
as many channels as both have, so the network starts as a shallow one. At 32x32x3 and 10 classes:

    cifar_fast  1,971,352 parameters  118,147,360 multiply-adds
"""

import keras
import numpy as np
from keras import layers

from models.networks.logits import logits_layer
from models.networks.whitening import whitening_kernel

WHITENING = "whitening"
BLOCK_FILTERS = (64, 256, 256)
PATCH = 2
_LOGITS_FACTOR = 1 / 9


def cifar_fast(*, image_shape: tuple[int, int, int] = (32, 32, 3), num_classes: int = 10) -> keras.Model:
    """Builds the network: float32 images [N, H, W, C] to float32 logits [N, num_classes].

    The whitening kernel is drawn at random; `whitening_weights` computes the one to train with.
    """
    images = layers.Input(image_shape, name="images")
    whitening = layers.Conv2D(2 * PATCH * PATCH * image_shape[-1], PATCH, name=WHITENING)
    x = _gelu(whitening(images))
    convolutions = []
    for block, filters in enumerate(BLOCK_FILTERS, start=1):
        for number in (1, 2):
            convolutions.append(_convolution(filters, f"block{block}_conv{number}"))
            x = convolutions[-1](x)
            if number == 1:
                x = layers.MaxPooling2D(2)(x)
            x = _norm(f"block{block}_norm{number}")(x)
            x = _gelu(x)
    x = layers.GlobalMaxPooling2D()(x)
    logits = logits_layer(num_classes, use_bias=False)(x)
    logits = layers.Rescaling(_LOGITS_FACTOR, dtype=logits.dtype, name="scaled_logits")(logits)
    model = keras.Model(images, logits, name="cifar_fast")
    whitening.kernel.trainable = False
    for convolution in convolutions:
        _start_as_identity(convolution)
    return model


def whitening_weights(images: np.ndarray) -> dict[str, np.ndarray]:
    """The whitening kernel from normalised training images [N, H, W, C], by its variable's path."""
    return {f"{WHITENING}/kernel": whitening_kernel(images, PATCH)}


def _gelu(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.Activation("gelu")(x)


def _norm(name: str) -> layers.BatchNormalization:
    # Averages over about ten batches. A longer average lags behind the weights, a shorter one is noisy.
    # The epsilon is the smallest that the fused kernel accepts: the last layers' variances end at 0.02.
    return layers.BatchNormalization(momentum=0.9, epsilon=1.1e-5, scale=False, name=name)


def _convolution(filters: int, name: str) -> layers.Conv2D:
    # Uniform in +-1 / sqrt(fan_in).
    drawn = keras.initializers.VarianceScaling(1 / 3, mode="fan_in", distribution="uniform")
    return layers.Conv2D(filters, 3, padding="same", use_bias=False, kernel_initializer=drawn, name=name)


def _start_as_identity(convolution: layers.Conv2D) -> None:
    """Sets the kernel so that output channel k equals input channel k, for as many channels as both have.

    An initializer of ours would be part of the exported file, which must load without this project.
    """
    kernel = np.array(convolution.kernel)
    height, width, inputs, outputs = kernel.shape
    same = np.arange(min(inputs, outputs))
    kernel[..., same] = 0.0
    kernel[height // 2, width // 2, same, same] = 1.0
    convolution.kernel.assign(kernel)
