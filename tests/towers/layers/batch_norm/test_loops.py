"""Loops of batch norm give the numbers of their formulas, for pairs of bfloat16 too; the length of their rows."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.tiers import first_quick
from towers.layers.batch_norm.loops import BatchNormLoops, Scaling, pixels_in_row, rows_of_sum

DTYPES = [tf.float32, tf.bfloat16, tf.float16]
SHAPES = [(5, 4, 4, 16), (3, 6, 5, 7), (4, 3, 10)]
# Rounding of a result in the inputs' dtype, and tolerance of sums in float32.
ROUNDING = {tf.float32: 1e-6, tf.bfloat16: 2**-8, tf.float16: 2**-11}
SUM_TOLERANCE = 2e-6
# Two numbers of 16 bits are one word, so bfloat16 is tested with even and odd numbers of channels.
QUICK = [(tf.bfloat16, SHAPES[0]), (tf.bfloat16, SHAPES[1]), (tf.float16, SHAPES[2]), (tf.float32, SHAPES[1])]
OTHERS = [case for case in itertools.product(DTYPES, SHAPES) if case not in QUICK]
every_case = pytest.mark.parametrize(
    "dtype, shape",
    first_quick([*QUICK, *OTHERS], len(QUICK)),
    ids=lambda given: getattr(given, "name", str(given)),
)


def drawn(shape, dtype, seed) -> tf.Tensor:
    return tf.cast(np.random.default_rng(seed).normal(0.5, 2.0, shape), dtype)


def vectors(channels) -> list[np.ndarray]:
    draw = np.random.default_rng(7)
    return [draw.normal(size=channels).astype(np.float32) for _ in range(5)]


def exact(tensor) -> np.ndarray:
    return tf.cast(tensor, tf.float64).numpy()


def assert_near(found, expected, tolerance):
    np.testing.assert_allclose(exact(found), expected, rtol=0, atol=tolerance * np.abs(expected).max())


@every_case
def test_each_number_as_by_its_formula(shape, dtype):
    inputs, other = drawn(shape, dtype, 1), drawn(shape, dtype, 2)
    mean, factor, offset, slope, shift = vectors(shape[-1])
    loops, scaling = BatchNormLoops(inputs), Scaling(mean, factor, offset)
    x, g = exact(inputs), exact(other)
    scaled = (x - mean) * factor + offset
    gradient = g * factor - ((x - mean) * slope + shift)
    through_moments = gradient - g * factor
    wanted = (
        (loops.scaled(scaling), scaled),
        (loops.positive(scaling), np.maximum(scaled, 0)),
        (loops.positive(scaling, other), np.maximum(scaled + g, 0)),
        (loops.gradient(other, Scaling(mean, slope, shift), factor), gradient),
        (
            loops.gradient(other, Scaling(mean, slope, shift), factor, scaling),
            np.where(scaled > 0, gradient, through_moments),
        ),
    )
    for found, expected in wanted:
        assert found.dtype == dtype and found.shape == shape
        assert_near(found, expected, ROUNDING[dtype])


@every_case
def test_sums_as_by_their_formulas(shape, dtype):
    inputs, other = drawn(shape, dtype, 1), drawn(shape, dtype, 2)
    mean, factor, offset, *_ = vectors(shape[-1])
    loops, scaling = BatchNormLoops(inputs), Scaling(mean, factor, offset)
    x, g = exact(inputs), exact(other)
    masked, dims = np.where((x - mean) * factor + offset > 0, g, 0), tuple(range(len(shape) - 1))
    found = (
        loops.sums(),
        loops.squares(mean),
        *loops.gradient_sums(other, mean),
        *loops.gradient_sums(other, mean, scaling),
    )
    wanted = (x, (x - mean) ** 2, g * (x - mean), g, masked * (x - mean), masked)
    for ours, numbers in zip(found, wanted, strict=True):
        assert ours.dtype == tf.float32
        assert_near(ours, numbers.sum(dims), SUM_TOLERANCE)


@pytest.mark.parametrize("dtype", first_quick([tf.bfloat16, tf.float16, tf.float32]), ids=lambda dtype: dtype.name)
def test_not_a_number_stays(dtype):
    """Also where words of two numbers are rounded."""
    inputs = tf.constant([[[1.0, np.nan, 2.0, np.inf]]], dtype)
    scaling = Scaling(tf.zeros([4]), tf.ones([4]), tf.zeros([4]))
    loops = BatchNormLoops(inputs)
    for found in (loops.scaled(scaling), loops.positive(scaling), loops.positive(scaling, inputs)):
        assert np.array_equal(np.isnan(exact(found))[0, 0], [False, True, False, False])
        assert exact(found)[0, 0, 3] == np.inf


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=lambda dtype: dtype.name)
def test_they_have_the_gradients_of_their_formulas(dtype):
    """TensorFlow has no gradient for words of two numbers."""
    inputs = drawn((3, 4, 6), dtype, 1)
    mean, factor, offset, *_ = map(tf.constant, vectors(6))

    def slopes(outputs_and_sums):
        with tf.GradientTape() as tape:
            tape.watch([inputs, factor, offset])
            outputs, sums = outputs_and_sums()
            total = tf.reduce_sum(tf.sin(tf.cast(outputs, tf.float32))) + tf.reduce_sum(sums * tf.range(1.0, 7.0))
        return tape.gradient(total, [inputs, factor, offset])

    def by_loops():
        loops = BatchNormLoops(inputs)
        return loops.positive(Scaling(mean, factor, offset)), loops.squares(mean)

    def by_tensorflow():
        x = tf.cast(inputs, tf.float32)
        return tf.cast(tf.nn.relu((x - mean) * factor + offset), dtype), tf.reduce_sum(tf.square(x - mean), [0, 1])

    for found, expected in zip(slopes(by_loops), slopes(by_tensorflow), strict=True):
        assert_near(found, exact(expected), 2 * ROUNDING[dtype])


@pytest.mark.parametrize(
    "positions, channels, in_row", [(1024, 16, 32), (225, 64, 9), (9, 256, 3), (4, 2048, 1), (15, 8, 15)]
)
def test_a_row_is_long_and_of_whole_pixels(positions, channels, in_row):
    assert pixels_in_row(positions, channels) == in_row


@pytest.mark.parametrize(
    "positions, channels, most_rows, rows, in_row",
    [
        (1024, 16, 8, 8, 2),
        (1024, 16, 16, 16, 2),
        (1024, 48, 16, 16, 1),
        (225, 64, 16, 15, 1),
        (225, 2, 8, 5, 45),
        (9, 256, 8, 3, 1),
        (289, 8, 8, 1, 17),
        (1, 2048, 8, 1, 1),
    ],
)
def test_a_summed_row_is_short_and_many_are_summed(positions, channels, most_rows, rows, in_row):
    assert rows_of_sum(positions, channels, most_rows) == (rows, in_row)
