"""Batch norm on one thread of a CPU in compiled loops: with AVX2 alone, and where towers exchange statistics.

The loops are those of `batch_norm/loops.py`, which has their times: over the inputs for the means, for the
variances and for the outputs; backward for the sums and for the inputs' gradient. A ReLU that follows is part of
these loops (`compiled_relu.py`). With AVX2 alone oneDNN's forward pass takes 5 to 9 ns an element on older CPUs,
and the loops 1.3 to 1.7. In float32 the gradients stay the fused kernel's, unless they come through a ReLU: a step
of ResNet-20 takes 0.97 of its CPU time with those in loops (three rounds in turn; AVX2 imitated on an AMD EPYC,
Zen 5).

With exchanged statistics both passes are compiled, also with AVX-512: the fused kernel would run twice, forward
and backward. Where 16 does not divide the channels, loops take 0.14 to 0.7 of its time there (float32 with 8
and 12 channels 1.11 to 1.15; Intel Xeon with AMX). Two synced towers make 0.97 of the rate of averaged ones in
bfloat16, 0.93 in float32 (ResNet-20, batch 256, AMD EPYC, Zen 5, medians of four rounds; of these 0.87 and 0.88
with a collective for each exchange and without ReLUs in the loops).

In 16 bits with AVX2 alone a layer takes 0.28 to 0.56 of Keras's time forward and backward, where an example has
2,304 elements 0.81 (bfloat16; float16 0.23 to 0.50 and 0.79; fused kernels 0.47 to 1.1; the six shapes of
`measured_kernels.py`, 64 images, imitated on the Xeon). A step of ResNet-20 in bfloat16 takes 991 CPU ms
instead of 1,283 (two towers, batch 256, two rounds in turn, imitated). In float32 a step takes 0.82 of its CPU
time with ResNet-20 (ten alternations: 1,341 and 1,096 ms), 0.96 with `cifar_fast` (eight: 2,534 and 2,436). On
two threads the largest shape takes 4.1 ms by the clock, Keras's 10.3; more were not measured, and XLA's loops
share little of the work. The forecast of memory is within 0.01% (ResNet-20, two towers of 64 images).

XLA compiles once for each shape and device, in 0.15 s: for the usual batch, a short last batch, and the batches of
an evaluation. A batch norm can't be padded, and masks would cost a pass.

Tried, and did not pay: a whole batch norm in one compiled function, with barriers between its loops: a step of
ResNet-20 (batch 128) takes 425 to 438 CPU ms instead of 402 to 410, a first step 7.1 to 7.3 s instead of 6.8 to
7.0 (AMD EPYC, Zen 3, two rounds in turn; a noisy one before them had 432 and 489 ms, 7.3 and 8.6 s). In
bfloat16 with AVX-512, gradients by loops behind the fused kernel's forward pass: 258 CPU ms a step, by the
fused kernel 265 (254 to 274 and 250 to 330, six rounds in turn, Xeon), and a first step of 3.2 s instead of
2.2. Forward passes by loops with AVX-512 and averaged statistics: the fused kernel takes half as long. For
exchanged statistics the fused kernel for normalising, joined with ReLUs: 0.857 of the averaged rate instead of
0.867 (Zen 5, before ReLUs were in the loops). Both moments in one loop around the mean of one example save 0.07
of 0.4 ms, less than that mean costs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from towers.layers.batch_norm.kernels import FusedKernel, Moments, num_values, with_gradient_passed_on
from towers.layers.batch_norm.loops import BatchNormLoops, Scaling
from towers.layers.made_tensors import made_by, note, passes_on

# For smaller examples Keras's operations are as fast.
FEWEST_ELEMENTS = 512

# For smaller examples the fused kernel is as fast, even where statistics are exchanged and it runs twice.
FEWEST_BESIDE_FUSED = 4096


class Normalized(NamedTuple):
    """What made the outputs of a compiled batch norm.

    Attributes:
      inputs: [N, ..., C]; they get the outputs' gradient unchanged.
      scaling: scaling of the inputs.
    """

    inputs: tf.Tensor
    scaling: Scaling


class Masked(NamedTuple):
    """What made a gradient that came through a ReLU whose only input was a compiled batch norm's outputs.

    Attributes:
      gradient: gradient of the ReLU's outputs.
      by: what made the ReLU's inputs; the gradient is 0 where they are not positive.
    """

    gradient: tf.Tensor
    by: Normalized


class CompiledKernel(FusedKernel):
    """Batch norm of [N, ..., C] in float32 or 16 bits whose dimensions other than N are known."""

    def trained(self, inputs, gamma, beta):
        @tf.custom_gradient
        def find_moments(inputs, gamma, beta):
            """The inputs, which get the outputs' gradient, and their moments."""
            moments = self.moments(inputs)

            def gradient(upstream, *_):
                is_masked = _upstream_of(inputs, upstream)[1] is not None
                if inputs.dtype == tf.float32 and not is_masked:
                    return self.gradients(inputs, moments, gamma, upstream, through_moments=True)
                count = _count(inputs)
                return self.synced_gradients(inputs, moments, gamma, upstream, lambda sums: sums / count)

            return (tf.identity(inputs), *moments), gradient

        inputs, mean, variance = find_moments(inputs, gamma, beta)
        moments = Moments(tf.stop_gradient(mean), tf.stop_gradient(variance))
        return self.outputs(inputs, moments, gamma, beta), moments

    def moments(self, inputs):
        """The inputs' own moments, in two passes, which lose no digits where the mean is large.

        Each pass sums an example's rows first and then the examples, so that few numbers round off in one sum.
        """
        loops, count = BatchNormLoops(inputs), _count(inputs)
        mean = loops.sums() / count
        return Moments(mean, loops.squares(mean) / count)

    def normalized(self, inputs, moments, gamma, beta):
        scaling = self._scaling(moments, gamma, beta)
        return _scaled(BatchNormLoops(inputs).with_gradient_of_scaled(scaling), scaling)

    def outputs(self, inputs, moments, gamma, beta):
        return _scaled(inputs, self._scaling(moments, gamma, beta))

    def _scaling(self, moments, gamma, beta) -> Scaling:
        return Scaling(moments.mean, gamma * tf.math.rsqrt(moments.variance + self.epsilon), beta)

    def synced_gradients(self, inputs, moments, gamma, upstream, mean_of_all):
        upstream, mask = _upstream_of(inputs, tf.ensure_shape(upstream, inputs.shape))
        loops, mean = BatchNormLoops(inputs), moments.mean
        inverse = tf.math.rsqrt(moments.variance + self.epsilon)
        products, of_beta = loops.gradient_sums(upstream, mean, mask)
        of_gamma, factor = products * inverse, gamma * inverse
        means = mean_of_all(tf.stack([of_gamma, of_beta]))
        slope = Scaling(mean, factor * inverse * means[0], factor * means[1])
        return loops.gradient(upstream, slope, factor, mask), of_gamma, of_beta


def _scaled(inputs: tf.Tensor, scaling: Scaling) -> tf.Tensor:
    """The scaled inputs; their gradient is passed on to the inputs. A ReLU that follows may join this loop."""
    outputs = with_gradient_passed_on(lambda x: BatchNormLoops(x).scaled(scaling), inputs)
    return note(outputs, Normalized(inputs, scaling))


def _upstream_of(inputs, upstream) -> tuple[tf.Tensor, Scaling | None]:
    """The upstream gradient of these inputs' batch norm, and its mask if a ReLU follows."""
    made = made_by(upstream)
    if isinstance(made, Masked) and passes_on(made.by.inputs, inputs):
        return tf.reshape(made.gradient, tf.shape(inputs)), made.by.scaling
    return upstream, None


def takes_compiled(
    shape: Sequence[int | None], dtype: tf.DType | str, axis: int, *, beside_fused: bool = False
) -> bool:
    """Whether the compiled kernel takes inputs of this shape, channels at dimension `axis`, and is faster.

    Otherwise they go to Keras's operations, or, `beside_fused`, to the fused kernel, which would run twice.

    Where other dimensions than the examples' vary, like the length of sequences, XLA would compile too many
    programs.
    """
    if len(shape) < 3 or axis != len(shape) - 1 or tf.as_dtype(dtype) == tf.float64:
        return False
    if None in shape[1:] or math.prod(shape[1:]) < FEWEST_ELEMENTS:
        return False
    return not beside_fused or beats_fused(shape, dtype)


def beats_fused(shape: Sequence[int | None], dtype: tf.DType | str) -> bool:
    """Whether the compiled kernel, where it takes such inputs, is faster than the fused one, which runs twice.

    oneDNN computes 16 channels at a time, and takes three to six times as long if 16 does not divide their number.
    """
    if math.prod(shape[1:]) >= FEWEST_BESIDE_FUSED:
        return True
    channels = shape[-1]
    return channels % 16 > 0 and (channels > 16 or tf.as_dtype(dtype) != tf.float32)


def _count(inputs: tf.Tensor) -> tf.Tensor:
    return tf.cast(num_values(inputs, len(inputs.shape) - 1), tf.float32)
