"""Kernels' gradients over small images, side by side: the same sums as in Keras's convolution."""

import numpy as np
import pytest
import tensorflow as tf

from tests.tiers import first_quick
from tests.towers.layers.convolutions.convolution_gradients import (
    convolution,
    gradients,
    operations_of_gradients,
    small_whole_numbers,
)
from towers.layers.kernels import LayerKernels

SIDE_BY_SIDE = LayerKernels(images_side_by_side=True)


@pytest.mark.parametrize("kernel", [3, 5, (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("count", [1, 4, 9])
@pytest.mark.parametrize("height, width", first_quick([(20, 7), (1, 1), (3, 3), (7, 7), (8, 8), (5, 2)], 2))
def test_as_keras(height, width, count, kernel):
    model = convolution((height, width, 4), 6, kernel)
    inputs, upstream = (small_whole_numbers((count, height, width, size), size) for size in (4, 6))
    found, expected = (gradients(model, inputs, upstream, one) for one in (SIDE_BY_SIDE, LayerKernels()))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(tf.cast(ours, tf.float32), tf.cast(theirs, tf.float32))


@pytest.mark.parametrize(
    "height, width, dtype, expected",
    [
        (7, 7, "bfloat16", 32),
        (8, 8, "bfloat16", 36),
        (9, 9, "bfloat16", 9),
        (7, 7, "float32", 7),
        (None, 7, "bfloat16", 7),
        (7, None, "bfloat16", None),
    ],
)
def test_for_which_gradients_images_are_laid_side_by_side(height, width, dtype, expected):
    """`expected` is the width of the input of the kernels' gradient: of one image, or of several side by side."""
    model = convolution((height, width, 4), 4, 3, dtype=dtype)
    operations = operations_of_gradients(model, tf.TensorSpec([None, height, width, 4], dtype), SIDE_BY_SIDE)
    (found,) = (operation for operation in operations if operation.type == "Conv2DBackpropFilter")
    assert found.inputs[0].shape[2] == expected
