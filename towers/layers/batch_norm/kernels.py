"""Kernels of batch norm: moments, normalised values and gradients of one tower's examples."""

import abc
import math
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf


class Moments(NamedTuple):
    """Mean and biased variance of each channel: [C], float32, or float64 for float64 inputs."""

    mean: tf.Tensor
    variance: tf.Tensor


class Kernel(abc.ABC):
    """Batch norm of one tower's examples.

    Attributes:
      epsilon: added to variances.
    """

    def __init__(self, epsilon: float):
        self.epsilon = epsilon

    @abc.abstractmethod
    def moments(self, inputs) -> Moments:
        """The inputs' own moments."""

    @abc.abstractmethod
    def normalized(self, inputs, moments: Moments, gamma, beta) -> tf.Tensor:
        """gamma * xhat + beta, in the inputs' dtype."""

    def outputs(self, inputs, moments: Moments, gamma, beta) -> tf.Tensor:
        """As `normalized`, but passes the outputs' gradient unchanged to `inputs`, and none to the others.

        For a batch norm with one function for all its gradients, which takes the gradient of `inputs`.
        """
        return with_gradient_passed_on(lambda x: self.normalized(x, moments, gamma, beta), inputs)

    @abc.abstractmethod
    def gradients(self, inputs, moments: Moments, gamma, upstream) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The gradients of `normalized` by inputs, gamma and beta, if the moments don't depend on the inputs."""

    def synced_gradients(
        self, inputs, moments: Moments, gamma, upstream, mean_of_all: Callable[[tf.Tensor], tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The gradients by inputs, gamma and beta, if the moments are those of all towers' examples.

        Args:
          mean_of_all: maps a tower's sums [2, C] to the means over all towers' examples; to zeros on a tower whose
            examples are not in the moments.
        """
        of_inputs, of_gamma, of_beta = self.gradients(inputs, moments, gamma, upstream)
        means = mean_of_all(tf.stack([of_gamma, of_beta]))
        # The gradient through the moments is a batch norm of the inputs too, with another scale and offset.
        factors = gamma * tf.math.rsqrt(moments.variance + self.epsilon) * means
        through_moments = self.normalized(inputs, moments, factors[0], factors[1])
        return of_inputs - through_moments, of_gamma, of_beta


class FusedKernel(Kernel):
    """TensorFlow's fused batch norm of [N, ..., C] in float32, bfloat16 or float16."""

    def trained(self, inputs, gamma, beta) -> tuple[tf.Tensor, Moments]:
        """The inputs normalised by their own moments, and these moments."""
        image = _as_image(inputs)
        outputs, mean, unbiased, *_ = tf.raw_ops.FusedBatchNormV3(
            x=image, scale=gamma, offset=beta, mean=[], variance=[], epsilon=self.epsilon, is_training=True
        )
        # The kernel returns variance * n / (n - 1); Keras's moving variance averages the biased one.
        count = tf.cast(num_values(image, 3), tf.float32)
        variance = unbiased * (tf.maximum(count - 1.0, 1.0) / count)
        return _in_shape_of(inputs, outputs), Moments(tf.stop_gradient(mean), tf.stop_gradient(variance))

    def moments(self, inputs):
        # Only the moments of the result are used; sums by other kernels take longer.
        ones = tf.ones([inputs.shape[-1]])
        return self.trained(inputs, ones, ones)[1]

    def normalized(self, inputs, moments, gamma, beta):
        outputs, *_ = tf.raw_ops.FusedBatchNormV3(
            x=_as_image(inputs),
            scale=gamma,
            offset=beta,
            mean=moments.mean,
            variance=moments.variance,
            epsilon=self.epsilon,
            is_training=False,
        )
        return _in_shape_of(inputs, outputs)

    def gradients(self, inputs, moments, gamma, upstream, *, through_moments: bool = False):
        """As for `Kernel`.

        Args:
          through_moments: whether the moments are the inputs' own.
        """
        of_inputs, of_gamma, of_beta, *_ = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=_as_image(upstream),
            x=_as_image(inputs),
            scale=gamma,
            reserve_space_1=moments.mean,
            reserve_space_2=moments.variance,
            reserve_space_3=tf.zeros([0]),
            epsilon=self.epsilon,
            is_training=through_moments,
        )
        return _in_shape_of(inputs, of_inputs), of_gamma, of_beta


class PlainOperations(Kernel):
    """Batch norm for what the fused kernel does not take: float64, and channels at any dimension."""

    def __init__(self, epsilon: float, axis: int, rank: int):
        super().__init__(epsilon)
        self._axis = axis
        self._others = [dim for dim in range(rank) if dim != axis]
        self._shape = [-1 if dim == axis else 1 for dim in range(rank)]

    def moments(self, inputs) -> Moments:
        # Two passes lose no digits where the mean is large.
        return Moments(*tf.nn.moments(wide(inputs), self._others))

    def normalized(self, inputs, moments, gamma, beta):
        return tf.cast(self._normal(inputs, moments) * self._spread(gamma) + self._spread(beta), inputs.dtype)

    def gradients(self, inputs, moments, gamma, upstream):
        upstream = wide(upstream)
        of_gamma = tf.reduce_sum(upstream * self._normal(inputs, moments), self._others)
        of_inputs = upstream * self._spread(gamma * tf.math.rsqrt(moments.variance + self.epsilon))
        return tf.cast(of_inputs, inputs.dtype), of_gamma, tf.reduce_sum(upstream, self._others)

    def _normal(self, inputs, moments):
        inverse = tf.math.rsqrt(moments.variance + self.epsilon)
        return (wide(inputs) - self._spread(moments.mean)) * self._spread(inverse)

    def _spread(self, vector):
        return tf.reshape(vector, self._shape)


def with_gradient_passed_on(function: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """function(x), whose gradient is passed to x unchanged.

    No gradient needs the value, so the graph drops it where it is not used.
    """

    @tf.custom_gradient
    def value(x):
        return function(x), lambda upstream: upstream

    return value(x)


def takes_fused(inputs: tf.Tensor, axis: int) -> bool:
    """Whether the fused kernel takes inputs with channels at dimension `axis`."""
    return axis == inputs.shape.rank - 1 and inputs.dtype != tf.float64


def num_values(inputs: tf.Tensor, axis: int) -> tf.Tensor:
    """The number of values of each channel."""
    return tf.size(inputs) // inputs.shape[axis]


def _as_image(inputs: tf.Tensor) -> tf.Tensor:
    """[N, ..., C] as [N, H, W, C], the only shape that the fused kernel takes."""
    *between, channels = inputs.shape[1:]
    if len(between) == 2:
        return inputs
    if None in between:
        return tf.reshape(inputs, [tf.shape(inputs)[0], -1, 1, channels])
    return tf.reshape(inputs, [-1, math.prod(between), 1, channels])


def _in_shape_of(inputs: tf.Tensor, image: tf.Tensor) -> tf.Tensor:
    """The inverse of `_as_image`: what was computed from the inputs, in their shape."""
    return image if inputs.shape.rank == 4 else tf.reshape(image, tf.shape(inputs))


def wide(values: tf.Tensor) -> tf.Tensor:
    """The values in float32; float64 stays."""
    return values if values.dtype == tf.float64 else tf.cast(values, tf.float32)
