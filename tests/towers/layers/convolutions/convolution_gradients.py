"""Gradients of a convolution, by any kernels; its sums are exact in every precision."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.towers.tiny_tasks import stacked


def small_whole_numbers(shape, seed, dtype="bfloat16") -> tf.Tensor:
    """-1, 0 and 1: no sum over them is rounded in bfloat16 as long as it is at most 256."""
    return tf.constant(np.random.default_rng(seed).integers(-1, 2, shape), dtype)


def convolution(shape, filters, kernel, *, stride=1, dtype="bfloat16") -> keras.Model:
    """A convolution with zero padding of inputs of this shape; its kernel has small whole numbers."""
    layer = layers.Conv2D(
        filters,
        kernel,
        strides=stride,
        padding="same",
        dtype=dtype,
        kernel_initializer=lambda shape, dtype: tf.cast(small_whole_numbers(shape, 3), dtype),
    )
    return stacked(shape, layer)


def gradients(model, inputs, upstream, kernels):
    """Outputs, and the gradients of inputs, kernel and bias, in the inputs' dtype."""
    values = [tf.cast(variable, inputs.dtype) for variable in model.trainable_variables]
    mapping = zip(model.trainable_variables, values, strict=True)
    with (
        tf.GradientTape() as tape,
        keras.StatelessScope(state_mapping=list(mapping)),
        kernels.in_place(model),
    ):
        tape.watch([inputs, *values])
        outputs = model(inputs)
    return [outputs, *tape.gradient(outputs, [inputs, *values], upstream)]


def operations_of_gradients(model, inputs: tf.TensorSpec, kernels) -> list[tf.Operation]:
    """The operations of forward and backward pass."""

    @tf.function(autograph=False)
    def traced(inputs):
        return gradients(model, inputs, None, kernels)

    return traced.get_concrete_function(inputs).graph.get_operations()
