"""Which convolutions of a model may get kernels of ours, and which kernel a convolution gets."""

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.towers.tiny_tasks import stacked
from towers.layers.convolutions.replaced import plain_convolutions, replaced_convolutions
from towers.layers.shadowing import shadowed


class OwnConvolution(layers.Conv2D):
    pass


@pytest.mark.parametrize(
    "layer",
    [
        layers.Conv2D(4, 3),
        layers.Conv2D(4, 1, padding="same"),
        layers.Conv2D(4, 2, padding="same"),
        layers.Conv2D(4, 3, padding="same", strides=4),
        layers.Conv2D(4, 3, padding="same", strides=(1, 2)),
        layers.Conv2D(4, 3, padding="same", dilation_rate=2),
        layers.Conv2D(4, 3, padding="same", groups=2),
        layers.Conv2D(4, 3, padding="same", data_format="channels_first"),
        OwnConvolution(4, 3, padding="same"),
    ],
    ids=["valid", "1x1", "even", "long stride", "two strides", "dilation", "groups", "channels first", "subclass"],
)
def test_layers_that_keep_their_own_convolution(layer):
    assert not list(plain_convolutions(stacked((7, 7, 4), layer)))


@pytest.mark.parametrize("takes, expected", [((False, True, True), 2), ((True, True), 1), ((False,), 0), ((), 0)])
def test_the_first_kernel_that_takes_the_inputs_computes_them(takes, expected):
    """Kernel i gives i everywhere; Keras's convolution of ones (kernel 0) gives 36 inside and less at edges."""
    model = stacked((8, 8, 4), layers.Conv2D(2, 3, strides=2, padding="same", kernel_initializer="ones"))
    inputs = tf.ones([1, 8, 8, 4])

    def kernel(number, is_taken):
        def found(inputs, kernel, stride):
            assert stride == 2
            return tf.fill([1, 4, 4, 2], float(number)) if is_taken else None

        return found

    kernels = [kernel(number, is_taken) for number, is_taken in enumerate(takes, start=1)]
    with shadowed(replaced_convolutions(model, kernels)):
        found = model(inputs)
    np.testing.assert_array_equal(found, np.full([1, 4, 4, 2], expected) if expected else model(inputs))
