"""Update rules: each against its formula in numpy, step by step; sparse gradients as dense ones."""

import numpy as np
import pytest
import tensorflow as tf

from tests.towers.user_errors import refused
from towers.update_rules import SGD, Adam, Momentum, everything, matrices_only

RATE, NUM_STEPS = 0.05, 10
SHAPE = (6, 3)


def start() -> np.ndarray:
    return np.random.default_rng(0).normal(size=SHAPE)


def gradients() -> list[np.ndarray]:
    """One a step; most rows are zero, as an embedding's are."""
    draw = np.random.default_rng(1)
    found = draw.normal(size=(NUM_STEPS, *SHAPE))
    found[:, [1, 4, 5]] = 0
    found[3:, 0] = 0
    return list(found)


def dense(gradient):
    return tf.constant(gradient, tf.float32)


def sparse(gradient):
    rows = np.flatnonzero(gradient.any(1))
    return tf.IndexedSlices(tf.constant(gradient[rows], tf.float32), tf.constant(rows), tf.constant(SHAPE))


def stepped(rule, as_gradient=dense, path="layer/kernel") -> np.ndarray:
    """The variable after the steps."""
    variable = tf.Variable(start(), dtype=tf.float32, trainable=False)
    slots = {name: tf.Variable(tf.zeros(SHAPE), trainable=False) for name in rule.slot_names}
    for update, gradient in enumerate(gradients()):
        rate = tf.constant(RATE, tf.float32)
        rule.apply(path, variable, slots, as_gradient(gradient), rate, tf.constant(update, tf.int64))
    return variable.numpy()


def sgd_formula():
    value = start()
    for gradient in gradients():
        value -= RATE * gradient
    return value


def momentum_formula(momentum, nesterov):
    value, velocity = start(), np.zeros(SHAPE)
    for gradient in gradients():
        velocity = momentum * velocity - RATE * gradient
        value += momentum * velocity - RATE * gradient if nesterov else velocity
    return value


def adam_formula(beta_1, beta_2, epsilon, weight_decay=0.0):
    value, first, second = start(), np.zeros(SHAPE), np.zeros(SHAPE)
    for count, gradient in enumerate(gradients(), 1):
        value -= RATE * weight_decay * value
        first = beta_1 * first + (1 - beta_1) * gradient
        second = beta_2 * second + (1 - beta_2) * gradient**2
        corrected_rate = RATE * np.sqrt(1 - beta_2**count) / (1 - beta_1**count)
        value -= corrected_rate * first / (np.sqrt(second) + epsilon)
    return value


FORMULAS = [
    (SGD(), sgd_formula()),
    (Momentum(momentum=0.8), momentum_formula(0.8, nesterov=False)),
    (Momentum(momentum=0.8, nesterov=True), momentum_formula(0.8, nesterov=True)),
    (Adam(beta_1=0.8, beta_2=0.95, epsilon=1e-3), adam_formula(0.8, 0.95, 1e-3)),
    (Adam(weight_decay=0.3), adam_formula(0.9, 0.999, 1e-7, weight_decay=0.3)),
]
every_rule = pytest.mark.parametrize(
    "rule, expected", FORMULAS, ids=["sgd", "momentum", "nesterov", "adam", "adamw"]
)


@every_rule
def test_formula(rule, expected):
    np.testing.assert_allclose(stepped(rule), expected, rtol=2e-5, atol=2e-6)


@every_rule
def test_sparse_gradients_give_the_dense_numbers(rule, expected):
    np.testing.assert_allclose(stepped(rule, sparse), stepped(rule), rtol=1e-6)


@every_rule
def test_slots_are_all_that_is_needed(rule, expected):
    assert len(rule.slot_names) == {SGD: 0, Momentum: 1, Adam: 2}[type(rule)]


def decayed_once(rule, shape) -> float:
    """What becomes of ones under a gradient of zero."""
    variable = tf.Variable(tf.ones(shape))
    slots = {name: tf.Variable(tf.zeros(shape)) for name in rule.slot_names}
    rule.apply("x/bias", variable, slots, tf.zeros(shape), tf.constant(RATE), tf.constant(0, tf.int64))
    return float(tf.reduce_mean(variable))


@pytest.mark.parametrize("kind", [SGD, Momentum, Adam])
@pytest.mark.parametrize(
    "decays, shape, decayed",
    [
        (matrices_only, [2, 3], True),
        (matrices_only, [3, 3, 4, 4], True),
        (matrices_only, [3], False),
        (matrices_only, [], False),
        (everything, [3], True),
    ],
)
def test_decay_is_by_the_rate_and_on_matrices_only(kind, decays, shape, decayed):
    expected = 1 - RATE * 0.4 if decayed else 1.0
    assert decayed_once(kind(weight_decay=0.4, decays=decays), shape) == pytest.approx(expected)


def test_matrices_only_is_the_default():
    assert SGD().decays is Momentum().decays is Adam().decays is matrices_only


def test_float64_is_kept():
    variable = tf.Variable(tf.ones([2], tf.float64))
    SGD().apply("x", variable, {}, tf.constant([1e-12, 0], tf.float64), tf.constant(1.0), tf.constant(0, tf.int64))
    assert 0 < 1 - variable.numpy()[0] < 1e-11


@pytest.mark.parametrize(
    "make, part",
    [
        (lambda: SGD(weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda: SGD(weight_decay=float("nan")), "weight_decay=nan"),
        (lambda: Momentum(momentum=1.0), "momentum=1.0"),
        (lambda: Momentum(momentum=-0.5), "momentum=-0.5"),
        (lambda: Adam(beta_1=1.0), "beta_1=1.0"),
        (lambda: Adam(beta_2=2), "beta_2=2"),
    ],
)
def test_what_is_refused(make, part):
    with refused(part):
        make()
