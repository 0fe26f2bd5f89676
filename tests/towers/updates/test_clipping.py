"""Clipping gives the numbers of TensorFlow's own functions on dense gradients, also with repeated sparse rows."""

import numpy as np
import pytest
import tensorflow as tf

from tests.towers.user_errors import refused
from towers import gradients
from towers.updates.clipping import Clipping


def sample():
    """A sparse gradient with a repeated row, a matrix, a vector, and a gradient too small to be clipped."""
    draw = np.random.default_rng(5)
    sparse = tf.IndexedSlices(
        tf.constant(draw.normal(size=(3, 2)), tf.float32), tf.constant([4, 1, 4]), tf.constant([6, 2])
    )
    return [gradients.merged(sparse), tf.constant(draw.normal(size=(3, 4)), tf.float32), tf.constant([1e-3])]


def clipped(clipping):
    found = clipping.apply(sample(), gradients.global_norm(sample()))
    assert isinstance(found[0], tf.IndexedSlices)
    return [tf.convert_to_tensor(gradient).numpy() for gradient in found]


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def dense_sample():
    return [tf.convert_to_tensor(gradient) for gradient in sample()]


@pytest.mark.parametrize("bound", [0.1, 1.0, 100.0])
def test_by_global_norm(bound):
    expected, _ = tf.clip_by_global_norm(dense_sample(), bound)
    assert_equal(clipped(Clipping(global_norm=bound)), expected)


def test_the_global_norm_of_float64_gradients_is_not_rounded():
    given = [tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64)]
    (found,) = Clipping(global_norm=1.0).apply(given, gradients.global_norm(given))
    np.testing.assert_allclose(np.linalg.norm(found), 1.0, rtol=1e-15)


@pytest.mark.parametrize("bound", [0.1, 1.0, 100.0])
def test_by_norm(bound):
    assert_equal(clipped(Clipping(norm=bound)), [tf.clip_by_norm(g, bound) for g in dense_sample()])


@pytest.mark.parametrize("bound", [0.1, 1.0, 100.0])
def test_by_value(bound):
    assert_equal(clipped(Clipping(value=bound)), [tf.clip_by_value(g, -bound, bound) for g in dense_sample()])


def test_no_clipping_changes_nothing():
    assert_equal(clipped(Clipping()), dense_sample())


@pytest.mark.parametrize("name", ["value", "norm", "global_norm"])
@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_bounds_are_positive_and_finite(name, bound):
    with refused(f"{name}={bound:g}"):
        Clipping(**{name: bound})


def test_two_kinds_of_clipping_are_refused():
    with refused("value=1", "norm=2", "only one is possible"):
        Clipping(value=1.0, norm=2.0)
