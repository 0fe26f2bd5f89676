"""Gradients of convolution kernels over small images, inside a CPU tower that computes in bfloat16.

oneDNN sums such a gradient one image row at a time, and a row of 7 pixels leaves three quarters of a matrix unit's
32 columns empty. So images are put side by side, with a gap of zeros between them, until a row has 32 pixels. The
sum is the same; with 256 channels at 7x7 and 3x3 it is 2 to 5 times as fast, the new layout included.

Tried, and slower (with AMX, ms for 256 channels): nine matrix products over images with a border of zeros (7x7:
60, side by side 51; 15x15: 137, plain 57), rows of 15 or more side by side (91, plain 57), float32 side by side
(55, plain 50), batches cut into 4 or 16 (222 and 234, whole 216).
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

_FULL_ROW = 32
# For rows of 15 or more the new layout costs more than it saves; at 8, with 64 channels, 2.2 ms become 1.7.
_WIDEST_NARROW = 8


def narrow_convolutions(model: keras.Model) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, attribute, function) for each convolution of the model that may get small images."""
    return [
        (layer, "convolution_op", functools.partial(_convolution, layer))
        for layer in model._flatten_layers()
        if _is_plain(layer)
    ]


def _is_plain(layer) -> bool:
    """Whether it is Keras's own Conv2D with stride 1, an odd kernel and an output as large as its input."""
    return (
        type(layer) is keras.layers.Conv2D
        and layer.padding == "same"
        and layer.data_format == "channels_last"
        and layer.groups == 1
        and set(layer.strides) == set(layer.dilation_rate) == {1}
        and all(size % 2 for size in layer.kernel_size)
        and max(layer.kernel_size) > 1
    )


def _convolution(layer, inputs, kernel):
    _, height, width, _ = inputs.shape
    if inputs.dtype != tf.bfloat16 or None in (height, width) or width > _WIDEST_NARROW:
        return type(layer).convolution_op(layer, inputs, kernel)
    return _narrow(inputs, tf.convert_to_tensor(kernel, inputs.dtype))


@tf.custom_gradient
def _narrow(inputs, kernel):
    def gradient(upstream):
        of_inputs = tf.raw_ops.Conv2DBackpropInput(
            input_sizes=tf.shape(inputs), filter=kernel, out_backprop=upstream, **_GEOMETRY
        )
        gap = kernel.shape[1] // 2
        of_kernel = tf.raw_ops.Conv2DBackpropFilter(
            input=_side_by_side(inputs, gap),
            filter_sizes=tf.shape(kernel),
            out_backprop=_side_by_side(upstream, gap),
            **_GEOMETRY,
        )
        return of_inputs, of_kernel

    return tf.nn.conv2d(inputs, kernel, **_GEOMETRY), gradient


_GEOMETRY = {"strides": [1, 1, 1, 1], "padding": "SAME"}


def _side_by_side(images: tf.Tensor, gap: int) -> tf.Tensor:
    """[N, H, W, C] as [N / k, H, k (W + gap), C]. If k does not divide N, images of zeros are added."""
    _, height, width, channels = images.shape
    per_row = -(-_FULL_ROW // (width + gap))
    missing = -tf.shape(images)[0] % per_row
    padded = tf.pad(images, [[0, missing], [0, 0], [0, gap], [0, 0]])
    groups = tf.reshape(padded, [-1, per_row, height, width + gap, channels])
    return tf.reshape(tf.transpose(groups, [0, 2, 1, 3, 4]), [-1, height, per_row * (width + gap), channels])
