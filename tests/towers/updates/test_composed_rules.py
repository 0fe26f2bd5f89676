"""Rules that contain rules, compared with their formulas."""

import numpy as np
import pytest
import tensorflow as tf

from tests.tiers import first_quick
from tests.towers.user_errors import refused
from towers.updates.composed_rules import Lookahead, ScaledRates
from towers.updates.rules import SGD, Adam, Momentum, Muon, everything

RATE, NUM_UPDATES = 0.1, 12


def start() -> np.ndarray:
    return np.random.default_rng(0).normal(size=4)


def gradients() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(NUM_UPDATES, 4))


def stepped(
    rule, path: str = "norm/beta", given=None, skipped: int = 0
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The variable and its slots after all updates, computed in a graph, as in a step.

    Args:
      rule: the rule.
      path: name of the variable.
      given: gradients; None for `gradients()`.
      skipped: number of steps that were skipped before.
    """
    variable = tf.Variable(start(), dtype=tf.float64, trainable=False)
    slots = {name: tf.Variable(tf.zeros([4], tf.float64), trainable=False) for name in rule.slot_names}

    @tf.function(autograph=False)
    def apply(gradient, update):
        rule.apply(path, variable, slots, gradient, tf.constant(RATE, tf.float32), update)

    count = 0
    for count, gradient in enumerate(gradients() if given is None else given, 1):
        apply(tf.constant(gradient), tf.constant(count - 1, tf.int64))
        if count + skipped == rule.num_steps:
            rule.finish(path, variable, slots, tf.constant(count, tf.int64))
    return variable.numpy(), {name: slot.numpy() for name, slot in slots.items()}


@pytest.mark.parametrize(
    "path, factor", [("block/norm/beta", 64.0), ("block/norm/gamma", 1.0), ("logits/bias", 1.0), ("beta", 64.0)]
)
def test_the_factor_applies_to_the_selected_parameters(path, factor):
    found, slots = stepped(ScaledRates(rule=SGD(), factor=64.0), path)
    np.testing.assert_allclose(found, start() - np.float32(RATE) * factor * gradients().sum(0), rtol=1e-6)
    assert slots == {}


DECAYING = {
    "sgd": SGD(weight_decay=0.5, decays=everything),
    "momentum": Momentum(weight_decay=0.5, decays=everything),
    "adam": Adam(weight_decay=0.5, decays=everything),
    "muon": Muon(weight_decay=0.1, other_weight_decay=0.5, decays=everything),
    "lookahead": Lookahead(rule=SGD(weight_decay=0.5, decays=everything), num_updates=NUM_UPDATES),
}


@pytest.mark.parametrize("name", first_quick(DECAYING, 3))
def test_the_factor_does_not_change_the_weight_decay(name):
    """Without a gradient a weight shrinks as it would without the factor."""
    rule = DECAYING[name]
    plain, scaled = (
        stepped(each, given=np.zeros((NUM_UPDATES, 4)))[0] for each in (rule, ScaledRates(rule=rule, factor=64.0))
    )
    np.testing.assert_allclose(scaled, plain, rtol=1e-6)
    assert np.all(np.abs(plain) < 0.9 * np.abs(start()))


def averaged_by_hand(every: int, last_decay: float) -> np.ndarray:
    value, velocity, slow = start(), np.zeros(4), None
    for done, gradient in enumerate(gradients(), 1):
        velocity = 0.5 * velocity - np.float32(RATE) * gradient
        value = value + velocity
        if slow is not None and done == NUM_UPDATES:
            value = slow
        elif done % every == 0:
            decay = last_decay * (done / NUM_UPDATES) ** 3
            slow = value = value if slow is None else decay * slow + (1 - decay) * value
    return value


@pytest.mark.parametrize("every", [1, 4, 5])
@pytest.mark.parametrize("last_decay", [0.0, 0.77])
def test_lookahead_resets_the_weights_to_their_average(every, last_decay):
    rule = Lookahead(rule=Momentum(momentum=0.5), num_updates=NUM_UPDATES, every=every, last_decay=last_decay)
    found, slots = stepped(rule)
    np.testing.assert_allclose(found, averaged_by_hand(every, last_decay), rtol=1e-6)
    assert list(slots) == ["momentum", "slow"]


def test_lookahead_beyond_the_planned_steps_stays_an_average():
    """The gradients alternate in sign, so they move a weight by at most one learning rate."""
    rule = Lookahead(rule=SGD(), num_updates=NUM_UPDATES)
    found, slots = stepped(rule, given=np.tile([[1.0] * 4, [-1.0] * 4], (5 * NUM_UPDATES, 1)))
    np.testing.assert_allclose(found, start(), atol=2 * RATE)
    np.testing.assert_allclose(slots["slow"], start(), atol=2 * RATE)


@pytest.mark.parametrize("every", [1, 4, 5])
def test_the_last_average_comes_if_a_step_was_skipped(every):
    rule = Lookahead(rule=SGD(), num_updates=NUM_UPDATES, every=every)
    found, slots = stepped(rule, given=gradients()[1:], skipped=1)
    np.testing.assert_array_equal(found, slots["slow"])
    assert np.any(found != 0)


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("every", [NUM_UPDATES // 2, 7, NUM_UPDATES - 1, NUM_UPDATES, 2 * NUM_UPDATES])
def test_a_run_too_short_to_average_keeps_its_weights(every, skipped):
    """The slow weights after the first reset are those of that step, without all later updates."""
    rule = Lookahead(rule=SGD(), num_updates=NUM_UPDATES, every=every)
    given = gradients()[skipped:]
    found, _ = stepped(rule, given=given, skipped=skipped)
    np.testing.assert_allclose(found, start() - np.float32(RATE) * given.sum(0), rtol=1e-6)


def test_invalid_numbers_are_refused():
    with refused("rate factor 0", "above 0"):
        ScaledRates(rule=SGD(), factor=0)
    with refused("every 0 of 5 updates", "at least 1"):
        Lookahead(rule=SGD(), num_updates=5, every=0)
    with refused("lookahead decay 1", "[0, 1)"):
        Lookahead(rule=SGD(), num_updates=5, last_decay=1.0)
