"""Gradients of convolution kernels over small images, inside a CPU tower that computes in bfloat16.

With AMX oneDNN sums such a gradient one image row at a time, and a row of 7 pixels leaves three quarters of a
matrix unit's 32 columns empty. So images are put side by side, with a gap of zeros between them, until a row has
32 pixels. The sum is the same; with 256 channels at 7x7 and 3x3 it is 2 to 5 times as fast, layout included.

Tried, and slower (with AMX, ms for 256 channels): nine matrix products over images with a border of zeros (7x7:
60, side by side 51; 15x15: 137, plain 57), rows of 15 or more side by side (91, plain 57), float32 side by side
(55, plain 50), batches cut into 4 or 16 (222 and 234, whole 216).

Without AMX the gradient is faster as a convolution whose channels are the examples. CPU ms, so and plain, the new
layouts included (AMD EPYC, Zen 4 with avx512_bf16, one thread, loaded): 128 examples of 8x8x64 3.5 and 4.9, 3.9
and 5.0; of 3x3x256 6.1 and 17.2, 512 of them 24.8 and 63.6; 32 and 64 of 8x8x64 1.2 and 1.7, 2.2 and 2.6, but 100,
no multiple of 16, 4.6 and 4.4. Slower: 512 of 7x7x256 (224 and 203), 15x15x64 (19.8 and 15.1), 16x16x32 (7.6 and
4.7), float32 (8x8x64: 8.2 and 6.4). Other ways for 8x8x64 (plain 4.9): side by side 5.1, images in one column 5.9,
one product over shifted copies 7.5, three 5.7, batches cut into four 5.5.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.layers.convolutions import gradient_scope

_FULL_ROW = 32
# For rows of 15 or more the new layout costs more than it saves; at 8, with 64 channels, 2.2 ms become 1.7.
_WIDEST_NARROW = 8
# With fewer channels, or more numbers in an example, examples as channels take longer than oneDNN's own gradient.
_FEWEST_CHANNELS, _LARGEST_EXAMPLE = 64, 4096


def by_long_rows(inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor | None:
    """The convolution whose kernel's gradient has images side by side; None where that doesn't pay."""
    return _narrow(_by_long_rows, inputs, kernel) if _is_narrow(inputs) else None


def by_channels(inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor | None:
    """The convolution whose kernel's gradient has the examples as channels; None where that doesn't pay."""
    pays = _is_narrow(inputs) and pays_as_channels(inputs.shape[1:], kernel.shape[-1])
    return _narrow(_by_channels, inputs, kernel) if pays else None


def _is_narrow(inputs: tf.Tensor) -> bool:
    _, height, width, _ = inputs.shape
    return inputs.dtype == tf.bfloat16 and None not in (height, width) and width <= _WIDEST_NARROW


def pays_as_channels(image: Sequence[int], filters: int) -> bool:
    """Whether convolutions of images [H, W, C] to [H, W, filters] gain from examples as channels."""
    height, width, channels = image
    is_large = height * width * max(channels, filters) > _LARGEST_EXAMPLE
    return min(channels, filters) >= _FEWEST_CHANNELS and not is_large


def _narrow(of_kernel, inputs, kernel):
    kernel = tf.convert_to_tensor(kernel, inputs.dtype)
    scope = gradient_scope()

    @tf.custom_gradient
    def convolution(inputs, kernel):
        def gradient(upstream):
            with tf.name_scope(scope):
                of_inputs = tf.raw_ops.Conv2DBackpropInput(
                    input_sizes=tf.shape(inputs), filter=kernel, out_backprop=upstream, **_GEOMETRY
                )
                return of_inputs, of_kernel(inputs, kernel, upstream)

        return tf.nn.conv2d(inputs, kernel, **_GEOMETRY), gradient

    return convolution(inputs, kernel)


_GEOMETRY = {"strides": [1, 1, 1, 1], "padding": "SAME"}


def _by_long_rows(inputs, kernel, upstream):
    gap = kernel.shape[1] // 2
    return tf.raw_ops.Conv2DBackpropFilter(
        input=_side_by_side(inputs, gap),
        filter_sizes=tf.shape(kernel),
        out_backprop=_side_by_side(upstream, gap),
        **_GEOMETRY,
    )


def _by_channels(inputs, kernel, upstream):
    """dw[a, b, c, d] = sum over n, h, w of x[n, h + a - p, w + b - p, c] * dy[n, h, w, d], with p = size // 2.

    That is a convolution of C images [H, W, N] with a kernel [H, W, N, D]; the edges p make its output [a, b].
    """
    edges = [[0, 0], *([size // 2] * 2 for size in kernel.shape[:2]), [0, 0]]
    found = tf.nn.conv2d(
        tf.transpose(inputs, [3, 1, 2, 0]), tf.transpose(upstream, [1, 2, 0, 3]), strides=1, padding=edges
    )
    return tf.ensure_shape(tf.transpose(found, [1, 2, 0, 3]), kernel.shape)


def _side_by_side(images: tf.Tensor, gap: int) -> tf.Tensor:
    """[N, H, W, C] as [N / k, H, k (W + gap), C]. If k does not divide N, images of zeros are added."""
    _, height, width, channels = images.shape
    per_row = -(-_FULL_ROW // (width + gap))
    missing = -tf.shape(images)[0] % per_row
    padded = tf.pad(images, [[0, missing], [0, 0], [0, gap], [0, 0]])
    groups = tf.reshape(padded, [-1, per_row, height, width + gap, channels])
    return tf.reshape(tf.transpose(groups, [0, 2, 1, 3, 4]), [-1, height, per_row * (width + gap), channels])
