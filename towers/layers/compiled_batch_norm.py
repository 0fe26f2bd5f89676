"""Batch norm in float32 on one thread of a CPU with AVX2 alone: the forward pass in compiled loops.

There oneDNN's forward pass takes 5 to 9 ns an element, and these loops 1.3 to 1.7: one over the inputs for the
means, one for the variances and one that normalises. The gradients stay the fused kernel's, with 1.4 ns.

With exchanged statistics the backward pass is compiled too: the fused kernel would run twice, before an
addition. Two loops for the sums and one for the inputs' gradient take 0.90, 0.87 and 0.96 of that time (128
images of 32x32x16, 16x16x32 and 8x8x64; AMD EPYC, Zen 3, medians of 40 in turn, twice), a whole step of
ResNet-20 0.975. On two threads they take 0.94 to 1.06 by the clock.

XLA compiles once for each shape and device, in 0.15 s: for the usual batch, for a last, short one, and for those
of an evaluation. A batch norm can't be padded, and masks would cost a pass.

On an AMD EPYC (Zen 3, least of 25, CPU ms) loops over 256 images take, in rows of one pixel's channels and in rows
of 1,024 numbers: squares 32x32x16 3.9 and 1.5, 16x16x32 1.9 and 0.6, 8x8x64 0.8 and 0.5; normalising 3.5 and 2.6,
1.4 and 1.2, 0.7 and 0.75. In rows of one pixel's channels they were no faster than oneDNN there: a step of
ResNet-20 took 1,046 to 1,140 ms, with oneDNN's batch norms 1,022 to 1,071 (three rounds in turn); in long rows 909
to 1,198, in turn with 1,056 to 1,132.

In rows of one pixel's channels, CPU ms, forward and backward, and of normalising alone; imitated AVX2, one thread,
medians of seven alternations (Intel Xeon with AVX-512, loaded):

                    compiled  oneDNN  Keras      alone: compiled  oneDNN  Keras
    128x32x32x16    5.1       14.0    14.3              1.7       9.9     3.1
    128x16x16x32    3.0       12.2    7.7               0.9       9.8     1.5
    128x8x8x64      1.7       6.2     3.7               0.7       4.9     0.9
    128x15x15x256   18.7      84.2    68.7              4.9       69.9    9.4
    128x3x3x256     1.1       2.9     2.1               0.6       2.2     0.6
    128x4x4x32      0.5       1.0     0.7               0.4       0.8     0.3

With 64 examples (five alternations) ours / Keras's: 0.52, 0.55, 0.71 for the first three, 0.45 at 15x15x64, 0.50
at 7x7x256, 0.76 at 3x3x256. On two threads the largest shape takes 4.1 ms by the clock, Keras's 10.3; more were
not measured, and XLA's loops share little of the work.

A step takes 0.82 of its CPU time with ResNet-20 (ten alternations, batch 256, two towers: 1,341 and 1,096 ms),
0.96 with `cifar_fast` (eight: 2,534 and 2,436), 0.56 with synced statistics (four: 2,099 and 1,220). The forecast
of memory is within 0.01% (ResNet-20, two towers of 64 images).

Tried, and did not pay: ReLU and the residual's addition in these loops (prototype, imitated AVX2, one thread, 128
images, CPU ms in turn, medians of eight, Intel Xeon with AMX, two cores, loaded). Forward, normalising and ReLU,
apart and in one loop: 32x32x16 2.08 and 1.61, 16x16x32 0.85 and 0.68, 8x8x64 0.63 and 0.53; with the addition 2.54
and 2.15, 1.20 and 0.86, 0.80 and 0.65. For ResNet-20 that is about 10 of 892 ms a step. Backward, XLA's three
loops with the ReLU's mask lose to ReluGrad and the fused kernel: 7.45 and 3.85, 2.70 and 2.05, 1.52 and 1.21.
Convolutions take 77% of that step, updates, copies and layouts 0.1%. A whole batch norm in one compiled
function, with barriers between its loops: a step of ResNet-20 (batch 128) takes 425 to 438 CPU ms instead of 402
to 410, a first step 7.1 to 7.3 s instead of 6.8 to 7.0 (AMD EPYC, Zen 3, two rounds in turn; a noisy one before
them had 432 and 489 ms, 7.3 and 8.6 s).
"""

import math
from collections.abc import Sequence

import tensorflow as tf

from towers.layers.batch_norm_kernels import FusedKernel, Moments, num_values

# In smaller examples Keras's operations are as fast.
FEWEST_ELEMENTS = 512

# Loops over rows of fewer numbers are slower: squares of 256x32x32x16 in rows of 16 take 3.9 ms, of 512 2.0, of
# 1,024 1.5; normalising 3.5, 2.8, 2.6 (least of 25; AMD EPYC, Zen 3).
_FEWEST_IN_ROW = 1024

_ROWS, _ROW = tf.TensorSpec([None, None, None], tf.float32), tf.TensorSpec([None], tf.float32)


@tf.function(jit_compile=True, autograph=False, input_signature=[_ROWS])
def _sums(rows):
    return tf.reduce_sum(rows, 1)


@tf.function(jit_compile=True, autograph=False, input_signature=[_ROWS, _ROW])
def _squares(rows, mean):
    return tf.reduce_sum(tf.square(rows - mean), 1)


@tf.function(jit_compile=True, autograph=False, input_signature=[_ROWS, _ROW, _ROW, _ROW])
def _scaled(rows, mean, factor, beta):
    return (rows - mean) * factor + beta


@tf.function(jit_compile=True, autograph=False, input_signature=[_ROWS, _ROWS, _ROW])
def _products(rows, upstream, mean):
    return tf.reduce_sum(upstream * (rows - mean), 1)


@tf.function(jit_compile=True, autograph=False, input_signature=[_ROWS, _ROWS, _ROW, _ROW, _ROW, _ROW])
def _of_inputs(rows, upstream, mean, factor, slope, offset):
    return upstream * factor - ((rows - mean) * slope + offset)


class CompiledKernel(FusedKernel):
    """Batch norm of float32 [N, ..., C] whose dimensions other than N are known."""

    def trained(self, inputs, gamma, beta):
        @tf.custom_gradient
        def normalize(inputs, gamma, beta):
            moments = self.moments(inputs)

            def gradient(upstream, *_):
                return self.gradients(inputs, moments, gamma, upstream, through_moments=True)

            return (self.normalized(inputs, moments, gamma, beta), *moments), gradient

        outputs, mean, variance = normalize(inputs, gamma, beta)
        return outputs, Moments(tf.stop_gradient(mean), tf.stop_gradient(variance))

    def moments(self, inputs):
        """The inputs' own: two passes lose no digits where the mean is large.

        Each pass sums an example's rows first and then the examples, so that few numbers round off in one sum.
        """
        rows = _in_rows(inputs)
        count = tf.cast(num_values(inputs, len(inputs.shape) - 1), tf.float32)
        mean = _of_channels(_sums(rows), inputs) / count
        return Moments(mean, _of_channels(_squares(rows, _in_row(mean, inputs)), inputs) / count)

    def normalized(self, inputs, moments, gamma, beta):
        factor = gamma * tf.math.rsqrt(moments.variance + self.epsilon)
        mean, factor, beta = (_in_row(vector, inputs) for vector in (moments.mean, factor, beta))
        return _like(inputs, _scaled(_in_rows(inputs), mean, factor, beta))

    def synced_gradients(self, inputs, moments, gamma, upstream, mean_of_all):
        rows, mean = _in_rows(inputs), _in_row(moments.mean, inputs)
        upstream_rows = _in_rows(tf.ensure_shape(upstream, inputs.shape))
        inverse = tf.math.rsqrt(moments.variance + self.epsilon)
        of_gamma = _of_channels(_products(rows, upstream_rows, mean), inputs) * inverse
        of_beta = _of_channels(_sums(upstream_rows), inputs)
        means, factor = mean_of_all(tf.stack([of_gamma, of_beta])), gamma * inverse
        vectors = (_in_row(vector, inputs) for vector in (factor, factor * inverse * means[0], factor * means[1]))
        return _like(inputs, _of_inputs(rows, upstream_rows, mean, *vectors)), of_gamma, of_beta


def takes_compiled(shape: Sequence[int | None], dtype: tf.DType | str, axis: int) -> bool:
    """Whether the compiled kernel takes such inputs with channels at dimension `axis`, and pays.

    Dimensions that vary beside the examples', as the length of sequences, would compile too many programs.
    """
    if len(shape) < 3 or axis != len(shape) - 1 or tf.as_dtype(dtype) != tf.float32:
        return False
    return None not in shape[1:] and math.prod(shape[1:]) >= FEWEST_ELEMENTS


def _pixels_in_row(shape: Sequence[int | None]) -> int:
    """The number of neighbouring positions of [N, ..., C] whose channels are a row of a loop."""
    positions, channels = math.prod(shape[1:-1]), shape[-1]
    long_enough = (
        count for count in range(1, positions + 1) if positions % count == 0 and count * channels >= _FEWEST_IN_ROW
    )
    return next(long_enough, positions)


def _in_rows(inputs: tf.Tensor) -> tf.Tensor:
    """[N, ..., C] as [N, rows, pixels * C]."""
    in_row = _pixels_in_row(inputs.shape)
    rows = math.prod(inputs.shape[1:-1]) // in_row
    return tf.reshape(inputs, [-1, rows, in_row * inputs.shape[-1]])


def _like(inputs: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """[N, rows, pixels * C] in the shape of the inputs."""
    return tf.ensure_shape(tf.reshape(rows, tf.shape(inputs)), inputs.shape)


def _in_row(vector: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """[C] as [pixels * C]."""
    return tf.tile(vector, [_pixels_in_row(inputs.shape)])


def _of_channels(rows: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """The sums [C] of [N, pixels * C]."""
    in_row = tf.reduce_sum(rows, 0)
    return tf.reduce_sum(tf.reshape(in_row, [-1, inputs.shape[-1]]), 0)
