"""Gradients of convolution kernels as convolutions whose channels are the examples, inside a CPU tower.

With inputs x, the gradient g of the outputs, a stride s, p rows and q columns of zeros before an image

    dw[a, b, c, k] = sum over n, h, w of x[n, s h + a - p, s w + b - q, c] g[n, h, w, k]

which is a convolution of one image, whose columns are the channels of one pixel after another:

    x [N, H, W, C] --> [1, H, W C, N] --+
                                        +--> [1, 3, 3 C, K]; the kernel's steps are s rows and s C columns
    g [N, h, w, K] --> [h, w, N, K] ----+

oneDNN computes the gradient of a kernel at half the rate of a convolution or less. This is a convolution with long
rows for any number of examples. (With C images instead of one, rows would have three results: at 8x8x64 that took
as long as oneDNN's gradient.)

Milliseconds by this method and by oneDNN, changes of layout included (AMD EPYC, Zen 5, bfloat16, one thread;
medians of nine in turn or the least):

    examples   8            32           128          more              128, two threads
    32x32x16   0.35, 0.31   0.88, 0.62   3.69, 2.35                     3.35, 2.08   off
    16x16x32   0.28, 0.32   0.63, 0.63   2.05, 2.00                                  off
    8x8x16     0.21, 0.22   0.23, 0.24   0.36, 0.35                     0.46, 0.47   off
    8x8x32     0.21, 0.24   0.30, 0.35   0.67, 0.75                     0.89, 0.90
    8x8x64     0.26, 0.33   0.52, 0.70   1.56, 2.23   1024: 13, 17      1.29, 1.47
    15x15x64   0.46, 0.60   1.38, 1.77   6.28, 7.53   512: 23.8, 28.1   3.83, 4.25
    32x32x64   1.57, 1.85   6.49, 7.33   25.3, 27.7
    16x16x128  1.44, 1.79   5.46, 6.88   23.6, 27.1
    8x8x256    1.29, 2.13   4.59, 7.54   19.5, 32.7                     10.5, 18.2
    7x7x256                              14.4, 29.3   512: 53.8, 108
    3x3x256                                           512: 8.7, 35.6
    4x4x512                                           64: 7.8, 22.7
    2x2x512    0.83, 4.20   1.30, 8.70   3.26, 24.4                     2.34, 14.1

With 5x5 kernels it takes 0.65 to 0.9 of the time, with stride 2 (8x8, 64 to 128 channels) 0.42; for one example of
8x8x64 0.85, for 100 of them, no multiple of 16, 1.09. Inputs and gradients of more than 8 MiB are computed in
parts that the cache holds: 512 of 15x15x64 to 256 take 111 ms at once, 80 in parts, 100 by oneDNN.

A step in bfloat16 takes 0.97 to 0.98 of its CPU time with ResNet-20 (batch 256), 0.85 with `cifar_fast` (1,024),
0.79 with VGG-16 (128), and there in float32 0.91 (two towers, three or two rounds in turn, the same CPU).

In bfloat16 the inputs are now transposed as words (`transposed_pairs.py`), unlike in the figures above: 128 of
8x8x64 take 2.7 instead of 3.0 ms (oneDNN 4.3), of 16x16x32 with stride 2 1.7 instead of 2.5 (2.9), a step of
ResNet-20 0.95 to 1.01 of its CPU time (AMD EPYC, Zen 4, four rounds in turn). Of 16x16x32 with stride 1 they take
3.2, by oneDNN 3.6, but a step with them takes 0.98 to 1.03 of the time (six rounds), so they stay oneDNN's.

In float32 it pays for up to 3x3 pixels: 128 of 2x2x512 6.6 and 19.1, with AVX2 21 and 40, of 3x3x256 4.0 and 6.8,
with AVX2 14.5 and 15.7; 7x7x64 takes 0.99, with AVX2 1.4 of the time. Larger ones are Winograd's (`winograd.py`).

With AMX oneDNN's gradient is faster, so fewer shapes gain (Intel Xeon with AMX, bfloat16; CPU ms of one thread,
two threads by the clock, medians of nine in turn):

    examples   8            32           128          512          128, two threads
    8x8x32     0.51, 0.36   0.66, 0.47   1.1, 0.9     3.4, 2.2                     off
    4x4x64     0.52, 0.41   0.63, 0.62   0.9, 1.4     2.2, 4.0     0.9, 1.1
    7x7x64     0.71, 0.52   0.79, 0.82   1.7, 2.3     5.8, 7.5     1.5, 1.5        off with two threads
    8x8x64     0.61, 0.50   0.85, 0.87   2.2, 2.4     7.8, 7.8     1.8, 1.7        off with two threads
    16x16x64   0.94, 0.64   1.8, 1.4     7.5, 4.2     29, 17                       off
    8x8x128    0.88, 0.99   1.4, 2.4     5.2, 7.8     24, 32       3.4, 4.5
    10x10x128  1.1, 1.1     1.9, 2.9     7.5, 9.7     34, 37       4.9, 5.5        off with two threads
    16x16x128               4.6, 4.4     22, 17                                    off
    3x3x256    0.8, 2.0     1.0, 4.9     2.4, 18      9.0, 65      1.8, 8.1
    7x7x256    1.6, 2.7     2.8, 8.2     13, 32       54, 120      7.5, 16
    14x14x256  4.4, 4.2     9.9, 14      44, 53       169, 212     28, 28
    2x2x512    1.6, 6.7     1.9, 18      3.9, 69      16, 236      2.8, 41

An earlier version had images side by side in rows of 32 pixels, with zeros between them: 128 of 7x7x256 took 15
ms, now 13, of 3x3x256 4.8, now 2.4. ResNet-20 trains at 1.02 times the rate of that version, `cifar_fast` at 1.03,
VGG-16 at 1.17.

In bfloat16 oneDNN leaves numbers of the gradient uninitialized if outputs are one column wide and the stride is
two or more: those whose pixels lie beyond the image (TensorFlow 2.21, AVX-512, with and without AMX). In this case
our gradient is used for any number of channels; kernels of even size, which are affected over images one column
wide, keep oneDNN's.

Tried, and no faster: edges of zeros by the convolution itself, pairs of a row's numbers transposed as float32,
parts of a few rows of pixels.

Tried for strided convolutions' gradients of inputs, and left out: four convolutions' results shuffled (16 to 32
channels, 32x32, 1.7 and 2.0 ms by oneDNN; 32 to 64 1.5 and 1.3), products spread over zeros for 1x1 kernels (0.75
and 1.05, 0.5 and 0.6), which would be 0.6% of a step of ResNet-20. With both shuffled and added in the loop of the
ReLU before them (16 to 32 channels) 2.2 ms instead of 3.1, about 1% of a step.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from towers.input.tower_parts import part
from towers.layers.convolutions.replaced import with_kernel_gradient
from towers.layers.convolutions.transposed_pairs import transposed
from towers.split import even_shares
from towers.task import Batch


class _Row(NamedTuple):
    """Limits of convolutions that gain: fewest input and output channels, most pixels of an output.

    Also the most threads of a tower, and the fewest examples of a usual call.
    """

    channels: int
    pixels: float
    threads: float = math.inf
    examples: int = 1


_FLOAT32 = (_Row(64, 9),)
_BFLOAT16 = (_Row(32, 64), _Row(64, math.inf))
_BFLOAT16_WITH_AMX = (
    _Row(64, 16, examples=32),
    _Row(64, 64, examples=32, threads=1),
    _Row(128, 64),
    _Row(128, 100, threads=1),
    _Row(256, 196),
    _Row(256, 256, threads=1),
)
# Most bytes of inputs and gradients that are computed at once; their number of examples is a multiple of
# _MULTIPLE.
_MOST_BYTES, _MULTIPLE = 2**23, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """Which convolutions compute the gradient of their kernel in this way.

    Attributes:
      amx: whether the CPU multiplies bfloat16 in its matrix units.
      num_threads: number of threads of a tower; 0 if it is not known.
      num_examples: number of examples of a usual call, by which it is computed in parts; None if it is not known.
    """

    amx: bool = False
    num_threads: int = 0
    num_examples: int | None = None

    def convolve(self, inputs: tf.Tensor, kernel: tf.Tensor, stride: int) -> tf.Tensor | None:
        """The convolution with such a gradient; None where that is not faster.

        Args:
          inputs, kernel, stride: as for `towers.layers.convolutions.replaced.Convolution`.
        """
        if not self.takes(inputs.shape, inputs.dtype, kernel.shape, stride):
            return None
        bytes_of_example = _bytes_of_example(inputs.shape, inputs.dtype, kernel.shape, stride)
        num_parts = _num_parts(self.num_examples or 1, bytes_of_example)
        return with_kernel_gradient(functools.partial(_in_parts, num_parts), inputs, kernel, stride)

    def takes(self, shape: Sequence[int | None], dtype, kernel: Sequence[int], stride: int = 1) -> bool:
        """Whether convolutions of inputs of this shape and dtype with a kernel of that shape gain, or need it."""
        if None in shape[1:]:
            return False
        dtype, outputs = tf.as_dtype(dtype), _outputs_of(shape, stride)
        if dtype == tf.bfloat16 and stride > 1 and outputs[1] == 1:
            return True  # oneDNN would leave a part of the gradient uninitialized.
        fewest, pixels = min(kernel[2:]), math.prod(outputs)
        if not any(fewest >= row.channels and pixels <= row.pixels for row in self._rows(dtype)):
            return False
        return _MULTIPLE * _bytes_of_example(shape, dtype, kernel, stride) <= _MOST_BYTES

    def _rows(self, dtype: tf.DType) -> list[_Row]:
        """The limits that apply to this tower's threads and examples."""
        in_bfloat16 = _BFLOAT16_WITH_AMX if self.amx else _BFLOAT16
        rows = {tf.float32: _FLOAT32, tf.bfloat16: in_bfloat16}.get(dtype, ())
        examples = math.inf if self.num_examples is None else self.num_examples
        threads = self.num_threads or math.inf
        return [row for row in rows if threads <= row.threads and examples >= row.examples]


def _outputs_of(shape, stride) -> tuple[int, int]:
    """Rows and columns of the outputs."""
    return -(-shape[1] // stride), -(-shape[2] // stride)


def _bytes_of_example(shape, dtype, kernel, stride) -> int:
    """Bytes of an example's inputs and of the gradient of its outputs."""
    return dtype.size * (math.prod(shape[1:]) + math.prod(_outputs_of(shape, stride)) * kernel[-1])


def _num_parts(num_examples: int, bytes_of_example: int) -> int:
    """The fewest parts that fit _MOST_BYTES; up to twice as many for multiples of _MULTIPLE examples."""
    least = -(-num_examples // max(1, _MOST_BYTES // bytes_of_example))
    even = (count for count in range(least, 2 * least) if num_examples % (count * _MULTIPLE) == 0)
    return next(even, least)


def _in_parts(num_parts, inputs, kernel_shape, upstream, stride):
    if num_parts == 1:
        return _at_once(inputs, kernel_shape, upstream, stride)
    found = []
    for index in range(num_parts):
        # With fewer examples than parts, some parts are empty; an example stands in for each.
        some, activity = part(Batch((inputs, upstream)), index, even_shares(num_parts))
        some_inputs, some_upstream = some.features
        of_part = tf.cast(_at_once(some_inputs, kernel_shape, some_upstream, stride), tf.float32)
        found.append(tf.where(activity > 0, of_part, tf.zeros_like(of_part)))
    return tf.cast(tf.add_n(found), inputs.dtype)


def _at_once(inputs, kernel_shape, upstream, stride):
    """The formula above."""
    _, height, width, channels = inputs.shape
    output_rows, output_columns = _outputs_of(inputs.shape, stride)
    above = _edges(height, output_rows, kernel_shape[0], stride)
    beside = [channels * edge for edge in _edges(width, output_columns, kernel_shape[1], stride)]
    columns = transposed(tf.reshape(inputs, [-1, height * width * channels]))
    image = tf.reshape(columns, [1, height, width * channels, tf.shape(inputs)[0]])
    found = tf.nn.conv2d(
        tf.pad(image, [[0, 0], above, beside, [0, 0]]),
        tf.transpose(upstream, [1, 2, 0, 3]),
        strides=1,
        padding="VALID",
        dilations=[stride, stride * channels],
    )
    return tf.reshape(found, kernel_shape)


def _edges(size: int, outputs: int, kernel: int, stride: int) -> list[int]:
    """Numbers of zeros before and after, as in padding SAME, for a kernel at least as long as the stride."""
    both = (outputs - 1) * stride + kernel - size
    return [both // 2, both - both // 2]
