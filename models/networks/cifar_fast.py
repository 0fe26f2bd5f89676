"""A small wide network that learns CIFAR-10 in few passes, after Jordan 2024 (arXiv:2404.00498, "airbench94").

    whitening   2x2x24, GELU: the kernel is frozen (whitening.py says what it is set to), its bias is trained
    block1      3x3x64,  2x2 max pool, norm, GELU, 3x3x64,  norm, GELU         31x31 -> 15x15
    block2      3x3x256, 2x2 max pool, norm, GELU, 3x3x256, norm, GELU         15x15 ->  7x7
    block3      3x3x256, 2x2 max pool, norm, GELU, 3x3x256, norm, GELU          7x7  ->  3x3
    logits      global max pool, num_classes without bias, divided by 9

Batch norms have a bias and no scale. Each convolution begins by passing its inputs on, as far as it has outputs
for them, so that the network is shallow at first. At 32x32x3 and 10 classes:

    cifar_fast  1,971,352 parameters  118,147,360 multiply-adds
"""

import keras
import numpy as np
from keras import layers

from models.networks.logits import logits_layer

WHITENING = "whitening"
BLOCK_FILTERS = (64, 256, 256)
PATCH = 2
_LOGITS_FACTOR = 1 / 9


def cifar_fast(*, image_shape: tuple[int, int, int] = (32, 32, 3), num_classes: int = 10) -> keras.Model:
    """Builds the network: float32 images [N, H, W, C] to float32 logits [N, num_classes]."""
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
        _pass_inputs_on(convolution)
    return model


def _gelu(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.Activation("gelu")(x)


def _norm(name: str) -> layers.BatchNormalization:
    # An average over about ten batches: longer is of other weights, shorter is noise. The epsilon is the smallest
    # that the fused kernel takes, since the deepest variances end at 0.02.
    return layers.BatchNormalization(momentum=0.9, epsilon=1.1e-5, scale=False, name=name)


def _convolution(filters: int, name: str) -> layers.Conv2D:
    # Uniform within 1 / sqrt(inputs of an output).
    drawn = keras.initializers.VarianceScaling(1 / 3, mode="fan_in", distribution="uniform")
    return layers.Conv2D(filters, 3, padding="same", use_bias=False, kernel_initializer=drawn, name=name)


def _pass_inputs_on(convolution: layers.Conv2D) -> None:
    """Output k of the first ones is input k. An initializer would be in the exported file."""
    kernel = np.array(convolution.kernel)
    height, width, inputs, outputs = kernel.shape
    same = np.arange(min(inputs, outputs))
    kernel[..., same] = 0.0
    kernel[height // 2, width // 2, same, same] = 1.0
    convolution.kernel.assign(kernel)
