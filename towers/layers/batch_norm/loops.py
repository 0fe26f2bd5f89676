"""Loops of batch norm over a tensor [N, ..., C] that XLA compiles for one thread of a CPU.

Where inputs come from memory, reading and writing determine a loop's time. So a ReLU that follows the batch norm,
with an addition before it, is part of the loop that writes the outputs. Its mask, computed from the inputs, is
part of the loops that read the gradient. All sums are taken in one pass over their tensors.

CPU ms of a loop over 128x32x32x16, one thread, and of TensorFlow's kernels (AMD EPYC, Zen 5; AVX2 imitated
there; the fused kernel forward: moments and outputs, which the loops compute apart):

                                 bfloat16      float32       float32, AVX2
    sums; of squares             0.36; 0.37    0.44; 0.45    0.47; 0.48
    outputs                      0.37          0.55          0.57
    max(0, outputs)              0.38          0.51          0.54
    max(0, outputs + addend)     0.52          0.73          0.81
    gradient's sums; masked      0.59; 0.61    0.80; 0.91    0.84; 0.85
    gradient; masked             0.50; 0.53    0.78; 0.77    0.83; 0.86
    fused forward; backward      0.55; 0.87    0.80; 1.23    1.26; 1.87
    ReluGrad; addition           0.83; 0.61    0.79; 0.67    0.87; 0.76

Since then sums are those of short rows: on a Zen 4 the gradient's sums take 0.56 instead of 0.78 ms in bfloat16,
in float32 0.8 instead of 1.1, with AVX2 too; and a loop that sums compiles in 0.11 s instead of 0.22.

Tried for averaged statistics with AVX-512: the fused kernel forward, and these loops backward behind ReLUs. In
bfloat16 a step of ResNet-20 takes 0.99 of its CPU time and the first one 0.9 s longer; in float32 no less time.
With the faster sums, behind all batch norms in bfloat16, backward passes take 54 instead of 60 CPU ms of 430 by
their operations, but whole steps as long as before (Zen 4, 36 pairs of three steps: 1.01, 1.04 and 1.02), and a
first step takes 1.3 s longer. Tried for sums: further loops and the last product compiled, too (0.1 s more to
compile); iterations over examples around sums in the cache (no faster than short rows).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops  # the one way to operations that only XLA has

from towers.layers.batch_norm.kernels import wide
from towers.layers.bfloat16_pairs import rounded, widened

# Fewest numbers in a row of an elementwise loop. Normalising 128x32x32x16 takes 0.38 ms in rows of 512 numbers and
# 0.65 in rows of 2,048, the gradient of the inputs 0.50 and 0.86 (bfloat16, AMD EPYC, Zen 5); in rows of 16 up to
# twice as long as in rows of 512.
_FEWEST_IN_ROW = 512
# The same for loops that sum, and the largest number of rows, which are summed side by side. Consecutive rows are
# short: rows that lie 4 KiB apart evict each other from the nearest cache. XLA does not unroll more rows. Masked
# sums of 128x32x32x16 in bfloat16 take 0.5 ms in 8 rows of 32 numbers, 0.6 in 4, 1.9 in 16, and 0.8 in 8 rows of
# 2,048 (AMD EPYC, Zen 4).
_FEWEST_IN_SUMMED_ROW = 32
_MOST_ROWS, _MOST_ROWS_OF_ONE_TENSOR = 8, 16


class Scaling(NamedTuple):
    """(x - mean) * factor + offset, with vectors [C] in float32."""

    mean: tf.Tensor
    factor: tf.Tensor
    offset: tf.Tensor


class BatchNormLoops:
    """Loops over inputs [N, ..., C] in float32 or 16 bits whose dimensions other than N are known."""

    def __init__(self, inputs: tf.Tensor):
        self._inputs = inputs
        *positions, self._channels = inputs.shape[1:]
        self._positions = math.prod(positions)
        # Whether loops read words of two numbers.
        self._are_pairs = inputs.dtype == tf.bfloat16 and self._channels % 2 == 0

    def sums(self) -> tf.Tensor:
        """Sums of x: [C]."""
        (found,) = self._summed(_itself, [], [])
        return found

    def squares(self, mean: tf.Tensor) -> tf.Tensor:
        """Sums of (x - mean)^2: [C]."""
        (found,) = self._summed(_square, [], [mean])
        return found

    def scaled(self, scaling: Scaling) -> tf.Tensor:
        """The inputs scaled, in their shape and dtype."""
        return self._each(_scaled, [], scaling)

    def with_gradient_of_scaled(self, scaling: Scaling) -> tf.Tensor:
        """The inputs; an upstream gradient of the scaled inputs becomes the gradient of the inputs and vectors."""
        return _with_gradient(lambda x, *_: tf.identity(x), self._plain(_scaled))(self._inputs, *scaling)

    def positive(self, scaling: Scaling, *addends: tf.Tensor) -> tf.Tensor:
        """max(0, scaled + addend), for at most one addend in the inputs' shape and dtype."""
        return self._each(_positive_sum if addends else _positive, addends, scaling)

    def gradient_sums(
        self, upstream: tf.Tensor, mean: tf.Tensor, mask: Scaling | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums of g * (x - mean) and of g, where g is the upstream gradient: [C] each.

        Args:
          upstream: in the inputs' shape and dtype.
          mean: [C].
          mask: g is 0 where the inputs scaled by it are not positive; its mean must be `mean`.
        """
        if mask is None:
            return self._summed(_products, [upstream], [mean])
        return self._summed(_masked_products, [upstream], mask)

    def gradient(
        self, upstream: tf.Tensor, slope: Scaling, factor: tf.Tensor, mask: Scaling | None = None
    ) -> tf.Tensor:
        """g * factor - (the inputs scaled by `slope`), with g as for `gradient_sums`.

        The slope's mean is that of the mask, and `factor` the mask's.
        """
        if mask is None:
            return self._each(_gradient, [upstream], [*slope, factor])
        return self._each(_masked_gradient, [upstream], [*slope, factor, mask.offset])

    def _each(self, formula, others, vectors) -> tf.Tensor:
        """Applies the formula to each number; the result has the inputs' shape and dtype."""
        pixels = pixels_in_row(self._positions, self._channels)

        def by_loop(*arguments):
            found = self._loop(formula, arguments, len(vectors), self._positions // pixels, pixels, sums=False)
            numbers = tf.bitcast(found, tf.bfloat16) if self._are_pairs else found
            return tf.ensure_shape(tf.reshape(numbers, tf.shape(self._inputs)), self._inputs.shape)

        return _with_gradient(by_loop, self._plain(formula))(self._inputs, *others, *vectors)

    def _plain(self, formula):
        return lambda *arguments: tf.cast(formula(*map(wide, arguments)), self._inputs.dtype)

    def _summed(self, formula, others, vectors) -> tuple[tf.Tensor, ...]:
        """The sums [C] of each of the formula's results."""
        most_rows = _MOST_ROWS if others else _MOST_ROWS_OF_ONE_TENSOR
        rows, pixels = rows_of_sum(self._positions, self._channels, most_rows)

        def by_loop(*arguments):
            of_blocks = self._loop(formula, arguments, len(vectors), rows, pixels, sums=True)
            return tuple(self._of_channels(of_blocks, rows))

        def plain(*arguments):
            but_last = list(range(len(self._inputs.shape) - 1))
            return tuple(tf.reduce_sum(one, but_last) for one in formula(*map(wide, arguments)))

        return _with_gradient(by_loop, plain)(self._inputs, *others, *vectors)

    def _loop(self, formula, arguments, num_vectors, rows, pixels, *, sums):
        num_tensors = len(arguments) - num_vectors
        loop = _compiled_loop(formula, self._inputs.dtype, self._are_pairs, num_tensors, num_vectors, sums)
        vectors = [self._in_row(arguments[num_tensors:], pixels)] if num_vectors else []
        return loop(*(self._rows(tensor, rows, pixels) for tensor in arguments[:num_tensors]), *vectors)

    def _rows(self, tensor: tf.Tensor, rows: int, pixels: int) -> tf.Tensor:
        """[N, ..., C] as [blocks, rows, pixels * C], or [blocks, rows, pixels * C / 2] words."""
        shape = [-1, rows, pixels * self._channels]
        if not self._are_pairs:
            return tf.reshape(tensor, shape)
        return tf.bitcast(tf.reshape(tensor, [*shape[:-1], shape[-1] // 2, 2]), tf.uint32)

    def _in_row(self, vectors: Sequence[tf.Tensor], pixels: int) -> tf.Tensor:
        """[C] each as [parts, vectors, pixels * C / parts]."""
        stacked = tf.stack(vectors)
        parts = [stacked[:, ::2], stacked[:, 1::2]] if self._are_pairs else [stacked]
        return tf.tile(tf.stack(parts), [1, 1, pixels])

    def _of_channels(self, of_blocks: Sequence[tf.Tensor], rows: int) -> list[tf.Tensor]:
        """The sums [C] of each result from [blocks, pixels * C / parts]: all first parts, then the second."""
        num_parts = 2 if self._are_pairs else 1
        num_examples = tf.shape(self._inputs)[0]
        pixels, channels = self._positions // rows, self._channels // num_parts
        # A matrix product sums [128, 2048] in 0.01 ms, TensorFlow's sum in 0.06 (AMD EPYC, Zen 5). XLA would put
        # the sum into the loop, which would then take several times as long.
        ones = tf.ones([1, num_examples])
        of_examples = [tf.matmul(ones, tf.reshape(one, [num_examples, pixels * channels])) for one in of_blocks]
        in_pixels = tf.reshape(tf.stack(of_examples), [num_parts, -1, pixels, channels])
        of_channels = tf.transpose(tf.reduce_sum(in_pixels, 2), [1, 2, 0])
        return tf.unstack(tf.reshape(of_channels, [len(of_blocks) // num_parts, self._channels]))


def _with_gradient(by_loop: Callable, plain: Callable) -> Callable:
    """`by_loop` with the gradient of `plain`, the same in TensorFlow's operations. Words have no gradient."""

    @tf.custom_gradient
    def computed(*arguments):
        def gradient(*upstream):
            with tf.GradientTape() as tape:
                tape.watch(arguments)
                found = plain(*arguments)
            return tape.gradient(found, arguments, [*upstream], unconnected_gradients="zero")

        return by_loop(*arguments), gradient

    return computed


def pixels_in_row(positions: int, channels: int, fewest_numbers: int = _FEWEST_IN_ROW) -> int:
    """The number of neighbouring positions whose channels are a row of a loop.

    Args:
      positions: number of positions of an example, such as its pixels; a multiple of the result.
      channels: number of channels of a position.
      fewest_numbers: minimum length of a row, if the example has as many numbers.
    """
    divisors = (count for count in range(1, positions + 1) if positions % count == 0)
    return next((count for count in divisors if count * channels >= fewest_numbers), positions)


def rows_of_sum(positions: int, channels: int, most_rows: int) -> tuple[int, int]:
    """The number of rows that a loop sums side by side, and of positions in each; see `pixels_in_row`."""
    rows = next(count for count in range(most_rows, 0, -1) if positions % count == 0)
    return rows, pixels_in_row(positions // rows, channels, _FEWEST_IN_SUMMED_ROW)


# Formulas. Arguments: float32 tensors of one shape, then vectors along its last dimension.


def _itself(x):
    return (x,)


def _square(x, mean):
    return (tf.square(x - mean),)


def _scaled(x, mean, factor, offset):
    return (x - mean) * factor + offset


def _positive(x, *scaling):
    return tf.nn.relu(_scaled(x, *scaling))


def _positive_sum(x, addend, *scaling):
    return tf.nn.relu(_scaled(x, *scaling) + addend)


def _products(x, g, mean):
    return g * (x - mean), g


def _masked(x, g, *scaling):
    return tf.where(_scaled(x, *scaling) > 0, g, tf.zeros_like(g))


def _masked_products(x, g, mean, factor, offset):
    return _products(x, _masked(x, g, mean, factor, offset), mean)


def _gradient(x, g, mean, slope, offset, factor):
    return g * factor - _scaled(x, mean, slope, offset)


def _masked_gradient(x, g, mean, slope, offset, factor, offset_of_mask):
    # With g itself in the condition's branch, LLVM loads it only once the condition is known: 1.1 to 1.2 ms
    # instead of 0.8.
    through_moments = _scaled(x, mean, slope, offset)
    return tf.where(_scaled(x, mean, factor, offset_of_mask) > 0, g * factor - through_moments, -through_moments)


@functools.cache
def _compiled_loop(
    formula: Callable, dtype: tf.DType, are_pairs: bool, num_tensors: int, num_vectors: int, sums: bool
) -> Callable:
    """A compiled function of [blocks, rows, numbers], and of vectors in row if the formula has some.

    Args:
      formula: one of those above.
      dtype: dtype of the numbers.
      are_pairs: whether rows are words of two numbers. The first and the second numbers are then a part each;
        otherwise a row is one part.
      num_tensors, num_vectors: the formula's arguments.
      sums: whether it returns the rows' sums [blocks, numbers] of each of the formula's results, for each part in
        turn; otherwise it returns the formula's only result.
    """

    def parts(rows):
        return widened(rows) if are_pairs else (wide(rows),)

    num_parts = 2 if are_pairs else 1
    signature = [tf.TensorSpec([None, None, None], tf.uint32 if are_pairs else dtype)] * num_tensors
    if num_vectors:
        signature += [tf.TensorSpec([num_parts, num_vectors, None], tf.float32)]

    @tf.function(jit_compile=True, autograph=False, input_signature=signature)
    def loop(*arguments):
        tensors = zip(*map(parts, arguments[:num_tensors]), strict=True)
        vectors = [tf.unstack(part) for part in tf.unstack(arguments[-1])] if num_vectors else [[]] * num_parts
        found = [formula(*some, *own) for some, own in zip(tensors, vectors, strict=True)]
        if not sums:
            return rounded(*found) if are_pairs else tf.cast(*found, dtype)
        return _sums_of_rows(tf.nest.flatten([list(of_part) for of_part in found]))

    return loop


def _sums_of_rows(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """The sums of [blocks, rows, numbers] over the rows, all in one loop, which reads its inputs once.

    XLA's own sums would become a loop each, and what two of them read would be kept in memory.
    """
    if len(tensors) == 1:
        return [tf.reduce_sum(tensors[0], 1)]
    zeros = [tf.zeros([])] * len(tensors)
    return gen_xla_ops.xla_variadic_reduce_v2(tensors, zeros, [1], _additions(len(tensors)))


@functools.cache
def _additions(count: int):
    """(a_1, ..., a_n, b_1, ..., b_n) to (a_1 + b_1, ..., a_n + b_n)."""

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([])] * (2 * count))
    def added(*numbers):
        return [a + b for a, b in zip(numbers[:count], numbers[count:], strict=True)]

    with tf.init_scope():
        return added.get_concrete_function()
