"""Moving statistics after several microbatches are those of towers that are averaged after each of them."""

import numpy as np
import pytest
import tensorflow as tf

from towers import batch_stats
from towers.moving_averages import Microbatches, after_all

DECAY = 0.9
# Weights by tower and microbatch. One microbatch is empty, tower 1 is idle in another one, tower 2 in all.
WEIGHTS = np.array([[4.0, 1.0, 0.0, 2.5, 3.0], [1.0, 2.0, 0.0, 0.0, 3.5], [0.0, 0.0, 0.0, 0.0, 0.0]], np.float32)


def state(*shape) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape)


def averaged_after_each(old, added, policy: str):
    """The state of one device if the towers' states are averaged after each microbatch."""
    for index, weights in enumerate(WEIGHTS.T):
        if weights.any():
            new = [{0: DECAY * old + of_tower[index]} for of_tower in added]
            old = batch_stats.combined([old], new, list(map(tf.constant, weights)), policy)[0]
    return old


@pytest.mark.parametrize("policy", ["average", "first"])
def test_the_states_after_all_microbatches_are_those_of_an_average_after_each(policy):
    old, added = tf.constant(state(7)), state(*WEIGHTS.shape, 7)
    totals, by_weight = WEIGHTS.sum(0), batch_stats.averages(policy)
    found = [
        after_all([old], {0: old}, Microbatches(own, [of_tower]), totals, [DECAY], by_weight=by_weight)
        for own, of_tower in zip(WEIGHTS, added, strict=True)
    ]
    found = batch_stats.combined([old], found, list(map(tf.constant, WEIGHTS.sum(1))), policy)
    np.testing.assert_allclose(found[0], averaged_after_each(old, added, policy), rtol=1e-12)


def test_other_state_stays_the_towers():
    old, new = tf.constant(state(3)), tf.constant(state(3) + 1)
    own = Microbatches(WEIGHTS[0], [state(5, 3)])
    found = after_all([old, old, old], {0: new, 1: new}, own, WEIGHTS.sum(0), [None, 0.5, None], by_weight=True)
    assert list(found) == [0, 1] and found[0] is new
    assert not np.allclose(found[1], new)
