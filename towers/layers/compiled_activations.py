"""GELU and SiLU inside a CPU tower: one compiled loop forward and one backward.

TensorFlow composes them from small operations, and each reads and writes memory: in bfloat16 a GELU takes 17 ns an
element on one thread, forward and backward; compiled it takes 2 ns. (A ReLU is one kernel already.)
"""

import math
from collections.abc import Callable

import keras
import tensorflow as tf
from keras import layers

# All layers whose call ends in `self.activation`, except cells of recurrent layers, which are called in loops.
_ELEMENTWISE = (
    layers.Activation,
    layers.Dense,
    layers.EinsumDense,
    layers.Conv1D,
    layers.Conv2D,
    layers.Conv3D,
    layers.Conv1DTranspose,
    layers.Conv2DTranspose,
    layers.Conv3DTranspose,
    layers.SeparableConv1D,
    layers.SeparableConv2D,
    layers.DepthwiseConv1D,
    layers.DepthwiseConv2D,
)


def activations_to_compile(model: keras.Model) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, attribute, compiled function) for each activation of the model that has a compiled form."""
    return [
        (layer, "activation", compiled)
        for layer in model._flatten_layers()
        if isinstance(layer, _ELEMENTWISE)
        for keras_function, compiled in _COMPILED
        # Compares by identity: a user's own activation may be neither hashable nor comparable.
        if layer.activation is keras_function
    ]


def _compiled(formula: Callable[[tf.Tensor], tf.Tensor], keras_function: Callable) -> Callable:
    """Applies `formula` to each element, in float32. Float64, used for comparisons, keeps Keras's function."""

    @tf.function(jit_compile=True, autograph=False)
    def outputs(flat):
        return tf.cast(formula(_wide(flat)), flat.dtype)

    @tf.function(jit_compile=True, autograph=False)
    def gradient(flat, upstream):
        with tf.GradientTape() as tape:
            numbers = _wide(flat)
            tape.watch(numbers)
            found = formula(numbers)
        return tf.cast(tape.gradient(found, numbers, _wide(upstream)), flat.dtype)

    @tf.custom_gradient
    def elementwise(x):
        # XLA compiles once for each shape; flattened, only once for each number of elements.
        flat, shape = tf.reshape(x, [-1]), tf.shape(x)
        return tf.reshape(outputs(flat), shape), lambda upstream: tf.reshape(
            gradient(flat, tf.reshape(upstream, [-1])), shape
        )

    def activation(x, *arguments, **options):
        if arguments or options or x.dtype == tf.float64 or not x.dtype.is_floating:
            return keras_function(x, *arguments, **options)
        return tf.ensure_shape(elementwise(x), x.shape)

    return activation


def _wide(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32)


def _gelu(x: tf.Tensor) -> tf.Tensor:
    # Uses erf, a polynomial; TensorFlow uses erfc, an exponential. XLA's erf ends at 1 - 9e-8; a large negative x
    # would multiply this error. Below -5.5 the function is less than 2e-7 away from 0.
    below = 0.5 * (1.0 + tf.math.erf(x * math.sqrt(0.5)))
    return x * tf.where(x > -5.5, below, 0.0)


def _silu(x: tf.Tensor) -> tf.Tensor:
    return x * tf.sigmoid(x)


_COMPILED = tuple(
    (keras_function, _compiled(formula, keras_function))
    for keras_function, formula in ((keras.activations.gelu, _gelu), (keras.activations.silu, _silu))
)
