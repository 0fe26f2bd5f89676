"""Gradients: sums, means and norms are the same for sparse gradients, repeated rows and dense gradients."""

import numpy as np
import pytest
import tensorflow as tf

from towers import gradients

ROWS, COLUMNS = 6, 3


def slices(*indices, seed=0):
    values = np.random.default_rng(seed).normal(size=(len(indices), COLUMNS)).astype(np.float32)
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices, tf.int64), tf.constant([ROWS, COLUMNS]))


def dense(gradient):
    return tf.convert_to_tensor(gradient).numpy()


def test_sparse_gradients_stay_sparse():
    parts = [slices(0, 2, seed=1), slices(2, 5, seed=2)]
    found = gradients.add(parts)
    assert isinstance(found, tf.IndexedSlices)
    assert found.indices.numpy().tolist() == [0, 2, 2, 5]
    np.testing.assert_allclose(dense(found), dense(parts[0]) + dense(parts[1]), rtol=1e-6)


def test_sparse_and_dense_add_up_dense():
    parts = [slices(0, 2), tf.ones([ROWS, COLUMNS])]
    found = gradients.add(parts)
    assert isinstance(found, tf.Tensor)
    np.testing.assert_allclose(found, dense(parts[0]) + 1, rtol=1e-6)


def test_the_sum_of_one_is_itself():
    gradient = slices(1)
    assert gradients.add([gradient]) is gradient


@pytest.mark.parametrize("gradient", [slices(0, 2, 2), tf.ones([2, 2])], ids=["sparse", "dense"])
def test_divided(gradient):
    found = gradients.divided(gradient, tf.constant(4.0, tf.float64))
    assert type(found) is type(gradient) and found.dtype == gradient.dtype
    np.testing.assert_allclose(dense(found), dense(gradient) * 0.25, rtol=1e-6)


def test_float64_is_divided_in_float64():
    """A factor rounded to float32 would be wrong by 1e-8."""
    found = gradients.divided(tf.ones([2], tf.float64), tf.constant(30.0, tf.float32))
    np.testing.assert_array_equal(found, [1 / 30, 1 / 30])


def test_divided_by_zero_is_zero():
    np.testing.assert_array_equal(gradients.divided(tf.ones([2]), tf.constant(0.0)), [0, 0])


def test_merged_has_each_row_once():
    gradient = slices(4, 1, 4, 4)
    found = gradients.merged(gradient)
    assert isinstance(found, tf.IndexedSlices)
    assert sorted(found.indices.numpy()) == [1, 4]
    np.testing.assert_allclose(dense(found), dense(gradient), rtol=1e-6)


def test_dense_gradients_need_no_merging():
    gradient = tf.ones([2])
    assert gradients.merged(gradient) is gradient


def test_norms_add_up_repeated_rows_first():
    """A row of 3 and the same row of -3 sum to zeros; the sum of their squares would be 18 for each element."""
    doubled = tf.IndexedSlices(
        tf.constant([[3.0] * COLUMNS, [-3.0] * COLUMNS]), tf.constant([1, 1]), tf.constant([ROWS, COLUMNS])
    )
    assert gradients.squared_norm(gradients.merged(doubled)).numpy() == 0


def test_global_norm_is_that_of_the_dense_gradients():
    found = [gradients.merged(slices(0, 3, 0, 3)), tf.constant([3.0, 4.0])]
    expected = tf.linalg.global_norm([tf.constant(dense(gradient)) for gradient in found])
    np.testing.assert_allclose(gradients.global_norm(found), expected, rtol=1e-6)


def test_norms_of_half_precision_do_not_overflow():
    assert np.isfinite(gradients.squared_norm(tf.constant([300.0], tf.float16)))
