"""Batch norm on one thread of a CPU in compiled loops: with AVX2 alone, and where towers exchange statistics.

With AVX2 alone oneDNN's forward pass takes 5 to 9 ns an element, and these loops 1.3 to 1.7: one over the
inputs for the means, one for the variances and one that normalises. In float32 the gradients stay the fused
kernel's, with 1.4 ns; in 16 bits they are compiled too: a loop for the sums and one for the inputs' gradient.

With exchanged statistics both passes are compiled, also with AVX-512: the fused kernel would run twice, forward
and backward. With AVX2 alone backward loops take 0.87 to 0.96 of its time (128 images of 32x32x16, 16x16x32 and
8x8x64; AMD EPYC, Zen 3, medians of 40 in turn, twice), a whole step of ResNet-20 0.975; on two threads 0.94 to
1.06 by the clock. With AVX-512 a step of two synced towers takes 588 CPU ms instead of 638, with averaged
statistics 530 (ResNet-20, batch 256, Intel Xeon with AMX). CPU ms of a call there, least of 25, one thread, 128
images, loops and fused kernels (forward: moments and normalised values; backward):

                float32, forward  backward         bfloat16, forward  backward
    32x32x16    1.83    2.13      2.28    2.52     1.55    1.52       1.75    2.00
    16x16x32    1.53    1.61      1.67    1.69     1.14    1.13       1.15    1.48
    8x8x64      0.98    0.99      1.07    1.10     0.84    0.74       0.83    1.04

(Backward, the fused kernels' subtraction comes on top.) Both passes, loops / fused kernels, for 64 images of each
of Inception's shapes and 128 of those of ResNet-20 and `cifar_fast`: from 4,096 elements of an example on 0.56 to
1.03, below 1.02 to 1.4; where 16 does not divide the channels, 0.14 to 0.7 (float32 with 8 and 12 channels 1.11
to 1.15).

In 16 bits with AVX2 alone a layer takes 0.28 to 0.56 of Keras's time forward and backward, where an example has
2,304 elements 0.81 (bfloat16; float16 0.23 to 0.50 and 0.79; fused kernels 0.47 to 1.1; the six shapes of
`measured_kernels.py`, 64 images, imitated on the same CPU). A step of ResNet-20 in bfloat16 takes 991 CPU ms
instead of 1,283 (two towers, batch 256, two rounds in turn, imitated).

XLA compiles once for each shape and device, in 0.15 s: for the usual batch, for a last, short one, and for
those of an evaluation. A batch norm can't be padded, and masks would cost a pass.

On an AMD EPYC (Zen 3, least of 25, CPU ms) loops over 256 images take, in rows of one pixel's channels and in
rows of 1,024 numbers: squares 32x32x16 3.9 and 1.5, 16x16x32 1.9 and 0.6, 8x8x64 0.8 and 0.5; normalising 3.5
and 2.6, 1.4 and 1.2, 0.7 and 0.75. In rows of one pixel's channels they were no faster than oneDNN there: a
step of ResNet-20 took 1,046 to 1,140 ms, with oneDNN's batch norms 1,022 to 1,071 (three rounds in turn); in
long rows 909 to 1,198, in turn with 1,056 to 1,132.

In rows of one pixel's channels, CPU ms, forward and backward, and of normalising alone; imitated AVX2, one
thread, medians of seven alternations (Intel Xeon with AVX-512, loaded):

                    compiled  oneDNN  Keras      alone: compiled  oneDNN  Keras
    128x32x32x16    5.1       14.0    14.3              1.7       9.9     3.1
    128x16x16x32    3.0       12.2    7.7               0.9       9.8     1.5
    128x8x8x64      1.7       6.2     3.7               0.7       4.9     0.9
    128x15x15x256   18.7      84.2    68.7              4.9       69.9    9.4
    128x3x3x256     1.1       2.9     2.1               0.6       2.2     0.6
    128x4x4x32      0.5       1.0     0.7               0.4       0.8     0.3

With 64 examples (five alternations) ours / Keras's: 0.52, 0.55, 0.71 for the first three, 0.45 at 15x15x64,
0.50 at 7x7x256, 0.76 at 3x3x256. On two threads the largest shape takes 4.1 ms by the clock, Keras's 10.3; more
were not measured, and XLA's loops share little of the work.

A step takes 0.82 of its CPU time with ResNet-20 (ten alternations, batch 256, two towers: 1,341 and 1,096 ms),
0.96 with `cifar_fast` (eight: 2,534 and 2,436), 0.56 with synced statistics (four: 2,099 and 1,220). The
forecast of memory is within 0.01% (ResNet-20, two towers of 64 images).

Tried, and did not pay: ReLU and the residual's addition in these loops (prototype, imitated AVX2, one thread,
128 images, CPU ms in turn, medians of eight, Intel Xeon with AMX, two cores, loaded). Forward, normalising and
ReLU, apart and in one loop: 32x32x16 2.08 and 1.61, 16x16x32 0.85 and 0.68, 8x8x64 0.63 and 0.53; with the
addition 2.54 and 2.15, 1.20 and 0.86, 0.80 and 0.65. For ResNet-20 that is about 10 of 892 ms a step. Backward,
XLA's three loops with the ReLU's mask lose to ReluGrad and the fused kernel: 7.45 and 3.85, 2.70 and 2.05, 1.52
and 1.21. Convolutions take 77% of that step, updates, copies and layouts 0.1%. A whole batch norm in one
compiled function, with barriers between its loops: a step of ResNet-20 (batch 128) takes 425 to 438 CPU ms
instead of 402 to 410, a first step 7.1 to 7.3 s instead of 6.8 to 7.0 (AMD EPYC, Zen 3, two rounds in turn; a
noisy one before them had 432 and 489 ms, 7.3 and 8.6 s). In bfloat16 with AVX-512, gradients by these loops
behind the fused kernel's forward pass: 258 CPU ms a step of ResNet-20, by the fused kernel 265 (254 to 274 and
250 to 330, six rounds in turn, Intel Xeon with AMX), and a first step of 3.2 s instead of 2.2.
Forward passes by these loops with AVX-512, averaged statistics (prototype, Zen 4): bfloat16 5.0 ms, oneDNN's 0.8;
float32 3.7 and 1.0.

Tried for exchanged statistics with AVX-512 (AMD EPYC, Zen 5, ResNet-20, batch 256, four or five rounds in turn),
where they make 0.87 of the averaged rate: loops over pairs of bfloat16 numbers (`bfloat16_pairs.py`; alone 0.53 to
1.05 of the time) 0.869 instead of 0.858; the fused kernel for normalising, joined with ReLUs (alone 0.4 to 0.9),
0.857 instead of 0.867, in float32 0.855 and 0.865. A step's tensors come from memory, not from the cache. Both
moments in one loop around the mean of one example take 1.1 to 3 times as long, because XLA computes that mean
again and again.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from towers.layers.batch_norm_kernels import FusedKernel, Moments, num_values, wide

# In smaller examples Keras's operations are as fast.
FEWEST_ELEMENTS = 512

# In smaller examples the fused kernel is as fast, also where statistics are exchanged and it runs twice.
FEWEST_BESIDE_FUSED = 4096

# Loops over rows of fewer numbers are slower: squares of 256x32x32x16 in rows of 16 take 3.9 ms, of 512 2.0, of
# 1,024 1.5; normalising 3.5, 2.8, 2.6 (least of 25; AMD EPYC, Zen 3).
_FEWEST_IN_ROW = 1024
# A loop sums down an image's rows; many of them probably push each other out of the nearest cache. With 64 and
# with 16 rows of 64x32x32x96, squares take 5.7 and 1.6 ms, the sums of the backward pass 10.9 and 4.9; those of
# 64x32x32x32 in bfloat16 with 32, 16 and 8 rows 6.2, 1.9 and 1.1 (one thread, AVX-512, Intel Xeon with AMX).
_MOST_ROWS = {2: 8, 4: 16}  # by the bytes of a number


class _Loops(NamedTuple):
    """Compiled functions of rows [N, rows, numbers] in one dtype and vectors [numbers] in float32."""

    sums: Callable
    squares: Callable
    scaled: Callable
    gradient_sums: Callable
    of_inputs: Callable


@functools.cache
def _loops(dtype: tf.DType) -> _Loops:
    rows, row = tf.TensorSpec([None, None, None], dtype), tf.TensorSpec([None], tf.float32)

    def compiled(*signature):
        return functools.partial(tf.function, jit_compile=True, autograph=False, input_signature=signature)

    @compiled(rows)
    def sums(rows):
        return tf.reduce_sum(wide(rows), 1)

    @compiled(rows, row)
    def squares(rows, mean):
        return tf.reduce_sum(tf.square(wide(rows) - mean), 1)

    @compiled(rows, row, row, row)
    def scaled(rows, mean, factor, beta):
        return tf.cast((wide(rows) - mean) * factor + beta, dtype)

    # One loop for both: apart they take 1.2 to 1.4 times as long. The moments' two loops in one take 0.9 to 1.5
    # times as long as apart (AVX2 and AVX-512).
    @compiled(rows, rows, row)
    def gradient_sums(rows, upstream, mean):
        upstream = wide(upstream)
        return tf.reduce_sum(upstream * (wide(rows) - mean), 1), tf.reduce_sum(upstream, 1)

    @compiled(rows, rows, row, row, row, row)
    def of_inputs(rows, upstream, mean, factor, slope, offset):
        return tf.cast(wide(upstream) * factor - ((wide(rows) - mean) * slope + offset), dtype)

    return _Loops(sums, squares, scaled, gradient_sums, of_inputs)


class CompiledKernel(FusedKernel):
    """Batch norm of [N, ..., C] in float32 or 16 bits whose dimensions other than N are known."""

    def trained(self, inputs, gamma, beta):
        @tf.custom_gradient
        def normalize(inputs, gamma, beta):
            moments = self.moments(inputs)

            def gradient(upstream, *_):
                if inputs.dtype == tf.float32:
                    return self.gradients(inputs, moments, gamma, upstream, through_moments=True)
                count = _count(inputs)
                return self.synced_gradients(inputs, moments, gamma, upstream, lambda sums: sums / count)

            return (self.normalized(inputs, moments, gamma, beta), *moments), gradient

        outputs, mean, variance = normalize(inputs, gamma, beta)
        return outputs, Moments(tf.stop_gradient(mean), tf.stop_gradient(variance))

    def moments(self, inputs):
        """The inputs' own: two passes lose no digits where the mean is large.

        Each pass sums an example's rows first and then the examples, so that few numbers round off in one sum.
        """
        rows, loops = _in_rows(inputs), _loops(inputs.dtype)
        count = _count(inputs)
        mean = _of_channels(loops.sums(rows), inputs) / count
        return Moments(mean, _of_channels(loops.squares(rows, _in_row(mean, inputs)), inputs) / count)

    def normalized(self, inputs, moments, gamma, beta):
        factor = gamma * tf.math.rsqrt(moments.variance + self.epsilon)
        mean, factor, beta = (_in_row(vector, inputs) for vector in (moments.mean, factor, beta))
        return _like(inputs, _loops(inputs.dtype).scaled(_in_rows(inputs), mean, factor, beta))

    def synced_gradients(self, inputs, moments, gamma, upstream, mean_of_all):
        rows, mean, loops = _in_rows(inputs), _in_row(moments.mean, inputs), _loops(inputs.dtype)
        upstream_rows = _in_rows(tf.ensure_shape(upstream, inputs.shape))
        inverse = tf.math.rsqrt(moments.variance + self.epsilon)
        products, sums = loops.gradient_sums(rows, upstream_rows, mean)
        of_gamma, of_beta = _of_channels(products, inputs) * inverse, _of_channels(sums, inputs)
        means, factor = mean_of_all(tf.stack([of_gamma, of_beta])), gamma * inverse
        vectors = (_in_row(vector, inputs) for vector in (factor, factor * inverse * means[0], factor * means[1]))
        return _like(inputs, loops.of_inputs(rows, upstream_rows, mean, *vectors)), of_gamma, of_beta


def takes_compiled(
    shape: Sequence[int | None], dtype: tf.DType | str, axis: int, *, beside_fused: bool = False
) -> bool:
    """Whether the compiled kernel takes such inputs with channels at dimension `axis`, and pays.

    Otherwise they go to Keras's operations, or, `beside_fused`, to the fused kernel, which would run twice.

    Dimensions that vary beside the examples', as the length of sequences, would compile too many programs.
    """
    if len(shape) < 3 or axis != len(shape) - 1 or tf.as_dtype(dtype) == tf.float64:
        return False
    if None in shape[1:] or math.prod(shape[1:]) < FEWEST_ELEMENTS:
        return False
    return not beside_fused or beats_fused(shape, dtype)


def beats_fused(shape: Sequence[int | None], dtype: tf.DType | str) -> bool:
    """Whether the compiled kernel, where it takes such inputs, is faster than the fused one, which runs twice.

    oneDNN takes 16 channels at a time, and three to six times as long if some are left.
    """
    if math.prod(shape[1:]) >= FEWEST_BESIDE_FUSED:
        return True
    channels = shape[-1]
    return channels % 16 > 0 and (channels > 16 or tf.as_dtype(dtype) != tf.float32)


def _pixels_in_row(inputs: tf.Tensor) -> int:
    """The number of neighbouring positions of [N, ..., C] whose channels are a row of a loop."""
    positions, channels = math.prod(inputs.shape[1:-1]), inputs.shape[-1]
    fewest = max(_FEWEST_IN_ROW / channels, positions / _MOST_ROWS[inputs.dtype.size])
    long_enough = (count for count in range(1, positions + 1) if positions % count == 0 and count >= fewest)
    return next(long_enough, positions)


def _in_rows(inputs: tf.Tensor) -> tf.Tensor:
    """[N, ..., C] as [N, rows, pixels * C]."""
    in_row = _pixels_in_row(inputs)
    rows = math.prod(inputs.shape[1:-1]) // in_row
    return tf.reshape(inputs, [-1, rows, in_row * inputs.shape[-1]])


def _like(inputs: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """[N, rows, pixels * C] in the shape of the inputs."""
    return tf.ensure_shape(tf.reshape(rows, tf.shape(inputs)), inputs.shape)


def _count(inputs: tf.Tensor) -> tf.Tensor:
    return tf.cast(num_values(inputs, len(inputs.shape) - 1), tf.float32)


def _in_row(vector: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """[C] as [pixels * C]."""
    return tf.tile(vector, [_pixels_in_row(inputs)])


def _of_channels(rows: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """The sums [C] of [N, pixels * C]."""
    # A product sums [128, 2048] in 0.01 ms, TensorFlow's sum in 0.06 (AMD EPYC, Zen 5).
    in_row = tf.matmul(tf.ones([1, tf.shape(rows)[0]]), rows)
    return tf.reduce_sum(tf.reshape(in_row, [-1, inputs.shape[-1]]), 0)
