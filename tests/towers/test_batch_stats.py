"""The combined state: averaged by weight or the first tower's, and unchanged if no tower changed it."""

import numpy as np
import pytest
import tensorflow as tf

from tests.towers.user_errors import refused
from towers import batch_stats

OLD = tf.constant([1.0, 2.0])
NEW = [tf.constant([2.0, 2.0]), tf.constant([5.0, 0.0]), tf.constant([100.0, 100.0])]


def average(old, new, weights_of_towers):
    """The average of states that are one tensor each."""
    return batch_stats.combined([old], by_index([value] for value in new), weights_of_towers, "average")[0]


def by_index(states) -> list[dict]:
    """States as `combined` takes new ones, by index; everything has changed."""
    return [dict(enumerate(state)) for state in states]


def weights(*values):
    return [tf.constant(value, tf.float32) for value in values]


def test_average_is_by_weight():
    found = average(OLD, NEW[:2], weights(3, 1))
    np.testing.assert_allclose(found, [(3 * 2 + 5) / 4, (3 * 2 + 0) / 4])


def test_a_tower_of_weight_0_adds_nothing():
    np.testing.assert_array_equal(average(OLD, NEW, weights(3, 1, 0)), average(OLD, NEW[:2], weights(3, 1)))


def test_without_any_weight_the_state_is_unchanged():
    np.testing.assert_array_equal(average(OLD, NEW, weights(0, 0, 0)), OLD)


def test_constants_are_unchanged_bit_for_bit():
    constant = tf.constant(np.random.default_rng(0).normal(size=1000) / 3, tf.float32)
    found = average(constant, [constant] * 3, weights(5, 3, 2))
    assert found.numpy().tobytes() == constant.numpy().tobytes()


def test_infinity_that_no_tower_changes_stays():
    """For example in a causal mask that is a frozen weight."""
    mask = tf.constant([0.0, -np.inf, 1e38])
    np.testing.assert_array_equal(average(mask, [mask] * 2, weights(3, 1)), mask)


def test_integers_are_taken_from_the_first_tower():
    found = average(tf.constant(1), [tf.constant(2), tf.constant(9)], weights(1, 5))
    assert found.dtype == tf.int32 and found.numpy() == 2


def test_tensors_of_all_kinds_at_once():
    """Matrices, scalars, integers and two precisions; one tensor is too large to be packed."""
    draw = np.random.default_rng(1)
    shapes = [(3,), (2, 4), (), (20_000,), (5,)]
    kinds = ["float32", "float64", "float32", "float32", "int64"]

    def state():
        return [tf.constant(draw.normal(size=s) * 9, kind) for s, kind in zip(shapes, kinds, strict=True)]

    old, new = state(), by_index([state(), state()])
    found = batch_stats.combined(old, new, weights(2, 1), "average")
    for index, (value, kind) in enumerate(zip(found.values(), kinds, strict=True)):
        one, other = (np.asarray(of_one[index]) for of_one in new)
        assert value.dtype == kind and value.shape == shapes[index]
        expected = one if kind == "int64" else (2 * one + other) / 3
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-13 if kind == "float64" else 1e-5)


def test_first_takes_the_first_towers_state():
    found = batch_stats.combined([OLD], by_index([value] for value in NEW), weights(1, 5, 5), "first")
    np.testing.assert_array_equal(found[0], NEW[0])


def test_synced_averages_what_the_towers_did_not_exchange():
    """For example a mean in a user's own layer."""
    found = [
        batch_stats.combined([OLD], by_index([value] for value in NEW), weights(1, 5, 5), name)[0]
        for name in ("synced", "average")
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("name", batch_stats.POLICIES)
def test_changes_summed_over_processes_give_the_same(name):
    """Summing `changes` over processes gives the state of `combined` in one process; booleans have no sums."""
    own = weights(1, 5, 2)
    old = [OLD, tf.constant(7), tf.constant([True, False, True])]
    new = by_index(
        [value, tf.constant(index), tf.constant([index > 0, index == 0, True])] for index, value in enumerate(NEW)
    )
    sent = [
        batch_stats.changes(old, mine, weight, is_first=index == 0, batch_stats=name)
        for index, (mine, weight) in enumerate(zip(new, own, strict=True))
    ]
    summed = {index: tf.add_n([of_one[index] for of_one in sent]) for index in range(3)}
    found = batch_stats.changed(old, summed, tf.add_n(own), name)
    expected = batch_stats.combined(old, new, own, name)
    for index in range(3):
        np.testing.assert_allclose(found[index], expected[index], rtol=1e-6)


def test_what_no_tower_changes_is_in_no_new_state():
    old = [tf.constant(3.0), OLD]
    found = batch_stats.combined(old, [{1: NEW[0]}, {1: NEW[1]}], weights(1, 1), "average")
    assert list(found) == [1]
    assert batch_stats.after(old, found)[0] is old[0]
    np.testing.assert_allclose(batch_stats.after(old, found)[1], [3.5, 1.0])


def test_an_unknown_name():
    with refused("batch_stats='median'", "average, first, synced"):
        batch_stats.check_batch_stats("median")
