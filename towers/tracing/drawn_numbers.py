"""Makes graphs that XLA compiles draw the random numbers that TensorFlow's kernels draw from the same seeds.

Both draw bits by Philox 4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011), but they
extend negative int32 seeds differently, and convert the bits to numbers differently. TensorFlow's kernels
(`stateless_random_ops.cc` and `random_distributions.h` of TensorFlow 2.21) take

    key, counter       four uint32 that Philox makes of the seed, by a constant key
    uniform, [0, 1)    the low bits as the mantissa of a number in [1, 2), less 1; of float64 the low 20 bits of
                       one uint32, and then all of the next one
    normal             pairs by Box and Muller's method: sqrt(-2 ln u) sin(2 pi v), sqrt(-2 ln u) cos(2 pi v)

The operations here do the same in compiled graphs: integers and uniform numbers, and so dropout's masks, are equal
bit for bit; normal numbers are equal up to rounding.
"""

import contextlib
import math

import tensorflow as tf
from tensorflow.python.framework import op_callbacks  # the only way to replace operations while they are traced

_PHILOX = 1
# The constant that TensorFlow encrypts seeds with.
_KEY_OF_SEEDS = 0x02461E293EC8F720
# By dtype: the unsigned integer of its size, the mask of its mantissa, and the bits of 1.0.
_FORMATS = {
    tf.float64: (tf.uint64, (1 << 52) - 1, 1023 << 52),
    tf.float32: (tf.uint32, (1 << 23) - 1, 127 << 23),
    tf.bfloat16: (tf.uint16, (1 << 7) - 1, 127 << 7),
    tf.float16: (tf.uint16, (1 << 10) - 1, 15 << 10),
}
# TensorFlow's kernels raise u to at least this before they take the logarithm.
_SMALLEST = 1e-7
_ALIKE = {
    "StatelessRandomGetAlg",
    "StatelessRandomUniformFullIntV2",
    "StatelessRandomUniformIntV2",
}
_PARTS_OF_NAMES = ("Random", "TruncatedNormal", "Multinomial")


@contextlib.contextmanager
def drawn_by_tensorflow():
    """Context manager: operations traced in it draw TensorFlow's numbers, even if XLA compiles them."""

    def replaced(kind, inputs, attrs, outputs, op_name=None, graph=None):
        name = kind.decode() if isinstance(kind, bytes) else kind
        if graph is None or name not in _REPLACED:
            return None
        found = _REPLACED[name](*inputs, outputs[0].dtype)
        for one, own in zip(found, outputs, strict=True):
            one.set_shape(own.shape)
        return found

    op_callbacks.add_op_callback(replaced)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(replaced)


def drawn_otherwise(kinds: set[str]) -> set[str]:
    """Those of the types of operations for which XLA draws, or may draw, other numbers than TensorFlow.

    Args:
      kinds: types of the operations whose results are used, in a graph traced with `drawn_by_tensorflow`.
    """
    random = {kind for kind in kinds if any(part in kind for part in _PARTS_OF_NAMES)}
    return random - _ALIKE


def _bits(shape, key, counter):
    """uint32 [*shape] with random bits, in the order in which TensorFlow's kernels use them."""
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=key, counter=counter, alg=_PHILOX, dtype=tf.uint32
    )


def _key_and_counter(seed, dtype: tf.DType) -> list[tf.Tensor]:
    """As StatelessRandomGetKeyCounter."""
    words = _bits([4], [_KEY_OF_SEEDS], tf.bitcast(tf.cast(seed, tf.int64), dtype))
    key, counter = tf.unstack(_joined(tf.reshape(words, [2, 2])))
    return [key[None], tf.stack([tf.zeros([], dtype), counter])]


def _uniform(shape, key, counter, algorithm, dtype: tf.DType) -> list[tf.Tensor]:
    """As StatelessRandomUniformV2."""
    per_number = _bits_per_number(dtype)
    return [_numbers(_bits(tf.concat([shape, [per_number]], 0), key, counter), dtype)]


def _normal(shape, key, counter, algorithm, dtype: tf.DType) -> list[tf.Tensor]:
    """As StatelessRandomNormalV2. In short formats it computes in float32."""
    computed = tf.float64 if dtype == tf.float64 else tf.float32
    count = tf.reduce_prod(shape)
    pairs = _bits([(count + 1) // 2, 2, _bits_per_number(computed)], key, counter)
    u, v = tf.unstack(_numbers(pairs, computed), axis=1)
    length = tf.sqrt(-2 * tf.math.log(tf.maximum(u, tf.constant(_SMALLEST, computed))))
    angle = tf.constant(2 * math.pi, computed) * v
    both = tf.stack([tf.sin(angle) * length, tf.cos(angle) * length], axis=1)
    return [tf.cast(tf.reshape(tf.reshape(both, [-1])[:count], shape), dtype)]


def _bits_per_number(dtype: tf.DType) -> int:
    """How many uint32 a number takes."""
    return 2 if dtype == tf.float64 else 1


def _numbers(bits, dtype: tf.DType) -> tf.Tensor:
    """Uniform numbers [...] in [0, 1) from uint32 [..., bits per number]."""
    unsigned, mantissa, one = _FORMATS[dtype]
    # For a float64 the word with the high bits comes first.
    number = _joined(tf.reverse(bits, [-1])) if dtype == tf.float64 else tf.cast(bits[..., 0], unsigned)
    number = number & tf.constant(mantissa, unsigned) | tf.constant(one, unsigned)
    return tf.bitcast(number, dtype) - tf.ones([], dtype)


def _joined(words) -> tf.Tensor:
    """uint64 [...] from uint32 [..., 2], the low word first."""
    low, high = tf.unstack(tf.cast(words, tf.uint64), axis=-1)
    return low | tf.bitwise.left_shift(high, tf.constant(32, tf.uint64))


_REPLACED = {
    "StatelessRandomGetKeyCounter": _key_and_counter,
    "StatelessRandomUniformV2": _uniform,
    "StatelessRandomNormalV2": _normal,
}
