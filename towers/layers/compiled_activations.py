"""GELU and SiLU inside a CPU tower: one compiled loop forward and one backward.

TensorFlow composes them from small operations, and each reads and writes memory: in bfloat16 a GELU takes 17 ns an
element on one thread, forward and backward; compiled it takes 2 ns. (A ReLU is one kernel already.)

XLA compiles once for each number of elements. Where more dimensions than the batch's vary, as the length of
sequences does, the elements are padded to one of a few numbers.
"""

import math
from collections.abc import Callable

import keras
import tensorflow as tf
from keras import layers

SMALLEST_SIZE = 8192

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
        is_padded = x.shape.rank is None or None in x.shape[1:]
        shape, flat = tf.shape(x), _flat(x, is_padded)

        def of_inputs(upstream):
            return _unflat(gradient(flat, _flat(upstream, is_padded)), shape, is_padded)

        return _unflat(outputs(flat), shape, is_padded), of_inputs

    def activation(x, *arguments, **options):
        if arguments or options or x.dtype == tf.float64 or not x.dtype.is_floating:
            return keras_function(x, *arguments, **options)
        return tf.ensure_shape(elementwise(x), x.shape)

    return activation


def _flat(x: tf.Tensor, is_padded: bool) -> tf.Tensor:
    """All elements as a vector: XLA compiles for each shape, and the same number of elements may have several."""
    flat = tf.reshape(x, [-1])
    if not is_padded:
        return flat
    count = tf.size(flat, tf.int64)
    return tf.pad(flat, [[0, padded_size(count) - count]])


def _unflat(flat: tf.Tensor, shape: tf.Tensor, is_padded: bool) -> tf.Tensor:
    return tf.reshape(flat[: tf.reduce_prod(shape)] if is_padded else flat, shape)


def padded_size(count: tf.Tensor) -> tf.Tensor:
    """The next multiple of a quarter of the largest power of two up to `count`; int64 scalar.

    So there are 4 sizes from any number to its double, and the padding is at most a quarter of `count`, except for
    counts below SMALLEST_SIZE, which all get that size.
    """
    count = tf.maximum(count, SMALLEST_SIZE)
    doublings = tf.math.floor(tf.math.log(tf.cast(count, tf.float64)) / math.log(2.0))
    step = tf.cast(tf.math.pow(tf.constant(2.0, tf.float64), doublings), tf.int64) // 4
    return -(-count // step) * step


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
