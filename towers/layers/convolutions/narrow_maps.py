"""Gradients of convolution kernels over small images, inside a CPU tower that computes in bfloat16 with AMX.

oneDNN sums such a gradient one image row at a time, and a row of 7 pixels leaves three quarters of a matrix unit's
32 columns empty. So images are put side by side, with a gap of zeros between them, until a row has 32 pixels. The
sum is the same; with 256 channels at 7x7 and 3x3 it is 2 to 5 times as fast, layout included.

Tried, and slower (with AMX, ms for 256 channels): nine matrix products over images with a border of zeros (7x7:
60, side by side 51; 15x15: 137, plain 57), rows of 15 or more side by side (91, plain 57), float32 side by side
(55, plain 50), batches cut into 4 or 16 (222 and 234, whole 216). Without AMX: `examples_as_channels.py`, which
was not measured with it.
"""

import tensorflow as tf

from towers.layers.convolutions.replaced import with_kernel_gradient

_FULL_ROW = 32
# For rows of 15 or more the new layout costs more than it saves; at 8, with 64 channels, 2.2 ms become 1.7.
_WIDEST_NARROW = 8


def by_long_rows(inputs: tf.Tensor, kernel: tf.Tensor, stride: int) -> tf.Tensor | None:
    """The convolution whose kernel's gradient has images side by side; None where that doesn't pay."""
    _, height, width, _ = inputs.shape
    known = None not in (height, width)
    if stride > 1 or not known or width > _WIDEST_NARROW or inputs.dtype != tf.bfloat16:
        return None
    return with_kernel_gradient(_by_long_rows, inputs, kernel, stride)


def _by_long_rows(inputs, kernel_shape, upstream, stride):
    gap = kernel_shape[1] // 2
    return tf.raw_ops.Conv2DBackpropFilter(
        input=_side_by_side(inputs, gap),
        filter_sizes=kernel_shape,
        out_backprop=_side_by_side(upstream, gap),
        strides=[1, stride, stride, 1],
        padding="SAME",
    )


def _side_by_side(images: tf.Tensor, gap: int) -> tf.Tensor:
    """[N, H, W, C] as [N / k, H, k (W + gap), C]. If k does not divide N, images of zeros are added."""
    _, height, width, channels = images.shape
    per_row = -(-_FULL_ROW // (width + gap))
    missing = -tf.shape(images)[0] % per_row
    padded = tf.pad(images, [[0, missing], [0, 0], [0, gap], [0, 0]])
    groups = tf.reshape(padded, [-1, per_row, height, width + gap, channels])
    return tf.reshape(tf.transpose(groups, [0, 2, 1, 3, 4]), [-1, height, per_row * (width + gap), channels])
