"""VGG-16 for 32x32: configuration D of Simonyan and Zisserman 2014 with batch norm.

    stage1  2 x (3x3x64)    -> pool 2x2/2     32x32 -> 16x16
    stage2  2 x (3x3x128)   -> pool 2x2/2     16x16 ->  8x8
    stage3  3 x (3x3x256)   -> pool 2x2/2      8x8  ->  4x4
    stage4  3 x (3x3x512)   -> pool 2x2/2      4x4  ->  2x2
    stage5  3 x (3x3x512)   -> pool 2x2/2      2x2  ->  1x1
    dense1  512, ReLU, dropout 0.5            (two of 4096 at 224x224; one of 512 is the usual CIFAR form)
    logits  num_classes

Each convolution is followed by batch norm and ReLU and has no bias, which the norm would cancel.
At 32x32x3 and 10 classes: 14,986,698 parameters, 313,463,808 multiply-adds.
Sources: arXiv:1409.1556, table 1; the CIFAR form after Liu and Deng 2015 (doi:10.1109/ACPR.2015.7486599),
without their dropout between convolutions.
"""

import keras
from keras import layers

from models.networks.logits import logits_layer

# (filters, convolutions) of each stage
STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
DENSE_UNITS = 512
DROPOUT_RATE = 0.5


def vgg16(*, image_shape: tuple[int, int, int] = (32, 32, 3), num_classes: int = 10) -> keras.Model:
    """Builds the network: float32 images [N, H, W, C] to float32 logits [N, num_classes]."""
    x = images = layers.Input(image_shape, name="images")
    for stage, (filters, num_convolutions) in enumerate(STAGES, start=1):
        for number in range(1, num_convolutions + 1):
            x = _conv_norm_relu(x, filters, f"stage{stage}_conv{number}")
        # "same", so that an image of any size passes.
        x = layers.MaxPooling2D(2, 2, padding="same")(x)
    x = layers.Flatten()(x)
    x = layers.Dense(DENSE_UNITS, activation="relu", kernel_initializer="he_normal", name="dense1")(x)
    x = layers.Dropout(DROPOUT_RATE, name="dense1_dropout")(x)
    logits = logits_layer(num_classes)(x)
    return keras.Model(images, logits, name="vgg16")


def _conv_norm_relu(x: keras.KerasTensor, filters: int, name: str) -> keras.KerasTensor:
    conv = layers.Conv2D(filters, 3, padding="same", use_bias=False, kernel_initializer="he_normal", name=name)
    # Momentum 0.9, not Keras's 0.99, so that the averages are usable after a few hundred steps.
    norm = layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")
    return layers.ReLU()(norm(conv(x)))
