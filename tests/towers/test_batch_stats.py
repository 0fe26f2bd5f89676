"""State after the towers: averaged by weight, the first's, and never changed where no tower changed it."""

import numpy as np
import pytest
import tensorflow as tf

from tests.towers.user_errors import refused
from towers import batch_stats

OLD = tf.constant([1.0, 2.0])
NEW = [tf.constant([2.0, 2.0]), tf.constant([5.0, 0.0]), tf.constant([100.0, 100.0])]


def weights(*values):
    return [tf.constant(value, tf.float32) for value in values]


def test_average_is_by_weight():
    found = batch_stats.average(OLD, NEW[:2], weights(3, 1))
    np.testing.assert_allclose(found, [(3 * 2 + 5) / 4, (3 * 2 + 0) / 4])


def test_a_tower_of_weight_0_adds_nothing():
    np.testing.assert_array_equal(
        batch_stats.average(OLD, NEW, weights(3, 1, 0)), batch_stats.average(OLD, NEW[:2], weights(3, 1))
    )


def test_no_weight_at_all_leaves_the_state():
    np.testing.assert_array_equal(batch_stats.average(OLD, NEW, weights(0, 0, 0)), OLD)


def test_constants_are_unchanged_bit_for_bit():
    constant = tf.constant(np.random.default_rng(0).normal(size=1000) / 3, tf.float32)
    found = batch_stats.average(constant, [constant] * 3, weights(5, 3, 2))
    assert found.numpy().tobytes() == constant.numpy().tobytes()


def test_integers_are_the_first_towers():
    found = batch_stats.average(tf.constant(1), [tf.constant(2), tf.constant(9)], weights(1, 5))
    assert found.dtype == tf.int32 and found.numpy() == 2


@pytest.mark.parametrize("name", ["first", "synced"])
def test_first(name):
    np.testing.assert_array_equal(batch_stats.COMBINATIONS[name](OLD, NEW, weights(1, 5, 5)), NEW[0])


def test_an_unknown_name():
    with refused("batch_stats='median'", "average, first, synced"):
        batch_stats.check_batch_stats("median")
