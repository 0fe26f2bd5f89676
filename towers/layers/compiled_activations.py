"""GELU and SiLU inside a CPU tower: one compiled loop forward and one backward.

TensorFlow composes them from small operations, and each reads and writes memory: in bfloat16 a GELU takes 17 ns an
element on one thread, forward and backward; compiled it takes 2 ns. (ReLUs: `compiled_relu.py`.) For 12 million
elements in bfloat16 (200 ms by TensorFlow, 25 compiled by erf) a table of all 65,536 values took 104 ms, XLA on
TensorFlow's own formula, by erfc, 76, and the formula by hand in float32 119.

For short vectors, like those between a network's last layers, the small operations are as fast, so they stay.

XLA compiles once for each number of elements. Where more dimensions than the batch's vary, as the length of
sequences does, the elements are padded to one of four numbers for each doubling: 40 lengths compiled 42 programs
instead of 160, in 3 s instead of 11, and an element takes 4 ns in float32 instead of 2.5 (Keras: 15; two AVX2
cores).
"""

import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from keras import layers

SMALLEST_SIZE = 8192
# With fewer elements in an example, starting a compiled loop takes longer than it saves: with 64 examples of 256
# elements a SiLU takes 1.05 times as long, with 1024 elements 0.9 times.
FEWEST_ELEMENTS = 512

# All Keras layers whose call ends in `self.activation`, except cells of recurrent layers, which run in loops.
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
        for layer in elementwise_layers(model)
        for keras_function, compiled in _COMPILED
        # Compares by identity: a custom activation may be neither hashable nor comparable.
        if layer.activation is keras_function and not _has_few(output_shape(layer))
    ]


def elementwise_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers whose call ends in `self.activation`."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, _ELEMENTWISE)]


def output_shape(layer: keras.layers.Layer) -> tuple[int | None, ...]:
    """The shape of a layer's outputs; (None, None) for a layer whose calls Keras does not record."""
    shapes = {tensor.shape for node in layer._inbound_nodes for tensor in node.output_tensors}
    return max(shapes, key=_known_elements, default=(None, None))


def _has_few(shape: Sequence[int | None]) -> bool:
    """Whether an example has few elements. A dimension that varies, like the length of sequences, may be long."""
    return None not in shape[1:] and _known_elements(shape) < FEWEST_ELEMENTS


def _known_elements(shape: Sequence[int | None]) -> int:
    """The number of elements of an example over the dimensions that don't vary."""
    return math.prod(size for size in shape[1:] if size is not None)


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
            # In a branch of tf.cond a tensor of the forward pass must not be an argument of a function itself.
            return _unflat(gradient(tf.identity(flat), _flat(upstream, is_padded)), shape, is_padded)

        return _unflat(outputs(flat), shape, is_padded), of_inputs

    def activation(x, *arguments, **options):
        is_short = x.shape.rank is not None and _has_few(x.shape)
        if arguments or options or x.dtype == tf.float64 or not x.dtype.is_floating or is_short:
            return keras_function(x, *arguments, **options)
        return tf.ensure_shape(elementwise(x), x.shape)

    return activation


def _flat(x: tf.Tensor, is_padded: bool) -> tf.Tensor:
    """All elements as a vector: XLA compiles for each shape, and several shapes have as many elements."""
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
