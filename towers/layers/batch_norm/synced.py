"""Batch norm over the examples of all towers: two small exchanges between kernels.

    forward     own moments  -> exchange (count, mean, mean square)      -> normalise by the batch's moments
    backward    own sums of dy and of dy * xhat, and dx without moments  -> exchange -> the moments' part of dx

The formulas are those of batch norm over the whole batch (Ioffe and Szegedy 2015, section 3). With xhat the
normalised inputs, N the number of all examples (times positions) and s = gamma / sqrt(variance + epsilon):

    dbeta = sum(dy)    dgamma = sum(dy * xhat)    dx = s * dy - s * (dbeta + xhat * dgamma) / N

The fused kernel runs on every device and for any number of images. For 128 images of 32x32x16 on one thread
`EuclideanNorm` and `BiasAddGrad` compute the moments in 1.6 ms, the fused kernel, whose output is dropped, in 1.5.
Towers of one thread of a CPU run compiled loops instead (`batch_norm/compiled.py`).

Each exchange waits for the slowest tower, 38 times in a step of ResNet-20. Tried, to fill the wait: the gradients
of kernels delayed until the next exchange has begun. Steps took as long (60 pairs, exchanges by collectives).
"""

import tensorflow as tf

from towers.exchange import TowerExchange
from towers.layers.batch_norm.kernels import Kernel, Moments, num_values


def synced_batch_norm(
    inputs: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    *,
    axis: int,
    kernel: Kernel,
    exchange: TowerExchange,
    weight: tf.Tensor | None,
) -> tuple[tf.Tensor, Moments]:
    """The inputs normalised by the moments of all towers' examples, and these moments.

    Args:
      inputs: the tower's examples, channels at dimension `axis`.
      gamma, beta: [C], in the dtype of the moments.
      axis: dimension of the channels, not negative.
      kernel: computes each tower's part; its epsilon is added to the variance.
      exchange: sums over the towers.
      weight: scalar; a tower of weight 0 adds nothing to any sum. Other weights count as 1, as does None.
    """
    dtype = gamma.dtype
    weight = tf.constant(1.0, dtype) if weight is None else tf.cast(tf.sign(weight), dtype)

    @tf.custom_gradient
    def share_moments(inputs, gamma, beta):
        """The inputs, which get the outputs' gradient, and the moments of all towers' examples."""
        own_count = weight * tf.cast(num_values(inputs, axis), dtype)
        count, moments = _of_all_towers(own_count, kernel.moments(inputs), exchange)

        def gradient(upstream, *_):
            def mean_of_all(sums):
                # Examples that are not in the moments get no gradient through them.
                return exchange.sum(sums) * (weight / count)

            return kernel.synced_gradients(inputs, moments, gamma, upstream, mean_of_all)

        return (tf.identity(inputs), *moments), gradient

    inputs, mean, variance = share_moments(inputs, gamma, beta)
    moments = Moments(tf.stop_gradient(mean), tf.stop_gradient(variance))
    return kernel.outputs(inputs, moments, gamma, beta), moments


def _of_all_towers(own_count, own: Moments, exchange: TowerExchange) -> tuple[tf.Tensor, Moments]:
    """The number of examples of all towers, at least 1, and their moments, from one exchange.

    The variance is mean(variance_i + mean_i^2) - mean^2 over the examples. In float32 the difference would lose
    the digits of small variances around a large mean; the vectors are short, so float64 costs nothing.
    """
    mean, variance, count = (tf.cast(value, tf.float64) for value in (*own, own_count))
    summed = exchange.sum(tf.concat([[count], count * mean, count * (variance + tf.square(mean))], 0))
    # All towers may be idle in a microbatch.
    total = tf.maximum(summed[0], 1)
    mean, square = tf.unstack(tf.reshape(summed[1:] / total, [2, -1]))
    variance = tf.maximum(square - tf.square(mean), 0)
    dtype = own.mean.dtype
    return tf.cast(total, dtype), Moments(tf.cast(mean, dtype), tf.cast(variance, dtype))
