"""Update rules: each gives its formula's numbers in numpy, with sparse gradients as with dense ones."""

import numpy as np
import pytest
import tensorflow as tf

from tests.towers.user_errors import refused
from towers.updates.rules import SGD, Adam, Momentum, Muon, everything, matrices_only, orthogonalized

RATE, NUM_STEPS = 0.05, 10
SHAPE = (6, 3)


def start() -> np.ndarray:
    return np.random.default_rng(0).normal(size=SHAPE)


def gradients() -> list[np.ndarray]:
    """One gradient for each step; most rows are zero, as in an embedding's gradient."""
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


def stepped(rule, as_gradient=dense, shape=SHAPE) -> np.ndarray:
    """The variable after all steps. `shape` has as many elements as SHAPE; the gradients are reshaped to it."""
    variable = tf.Variable(start().reshape(shape), dtype=tf.float32, trainable=False)
    slots = {name: tf.Variable(tf.zeros(shape), trainable=False) for name in rule.slot_names}
    for update, gradient in enumerate(gradients()):
        rate = tf.constant(RATE, tf.float32)
        given = as_gradient(gradient.reshape(shape))
        rule.apply("layer/kernel", variable, slots, given, rate, tf.constant(update, tf.int64))
    return variable.numpy()


def sgd_formula():
    value = start()
    for gradient in gradients():
        value -= RATE * gradient
    return value


def momentum_formula(momentum, nesterov, rate=RATE):
    value, velocity = start(), np.zeros(SHAPE)
    for gradient in gradients():
        velocity = momentum * velocity - rate * gradient
        value += momentum * velocity - rate * gradient if nesterov else velocity
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


def orthogonalized_formula(matrix):
    """Applies the polynomial to each singular value separately."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


def muon_formula(momentum, weight_decay=0.0, columns=SHAPE[-1]):
    value, velocity = start().reshape(-1, columns), np.zeros((start().size // columns, columns))
    for gradient in gradients():
        gradient = gradient.reshape(-1, columns)
        value -= RATE * weight_decay * value
        velocity = momentum * velocity + gradient
        value -= RATE * orthogonalized_formula(gradient + momentum * velocity)
    return value.reshape(SHAPE)


FORMULAS = [
    (SGD(), sgd_formula()),
    (Momentum(momentum=0.8), momentum_formula(0.8, nesterov=False)),
    (Momentum(momentum=0.8, nesterov=True), momentum_formula(0.8, nesterov=True)),
    (Adam(beta_1=0.8, beta_2=0.95, epsilon=1e-3), adam_formula(0.8, 0.95, 1e-3)),
    (Adam(weight_decay=0.3), adam_formula(0.9, 0.999, 1e-7, weight_decay=0.3)),
    (Muon(momentum=0.8, orthogonalizes=everything), muon_formula(0.8)),
    (Muon(weight_decay=0.3, orthogonalizes=everything), muon_formula(0.9, weight_decay=0.3)),
]
every_rule = pytest.mark.parametrize(
    "rule, expected", FORMULAS, ids=["sgd", "momentum", "nesterov", "adam", "adamw", "muon", "muon_decay"]
)


@every_rule
def test_formula(rule, expected):
    np.testing.assert_allclose(stepped(rule), expected, rtol=2e-5, atol=2e-6)


@every_rule
def test_sparse_gradients_give_the_dense_numbers(rule, expected):
    np.testing.assert_allclose(stepped(rule, sparse), stepped(rule), rtol=1e-6)


@every_rule
def test_slots_are_all_that_is_needed(rule, expected):
    assert len(rule.slot_names) == {SGD: 0, Momentum: 1, Adam: 2, Muon: 1}[type(rule)]


def decayed_once(rule, shape) -> float:
    """The value of a weight of 1 after one update with a gradient of zero."""
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


@pytest.mark.parametrize("shape", [(1, 2, 3, 3), (3, 2, 1, 3), (3, 1, 3, 2), (2, 9, 1), (1, 1, 18)], ids=str)
def test_muon_takes_a_kernel_as_the_matrix_of_its_outputs(shape):
    """[height, width, inputs, outputs] becomes [height * width * inputs, outputs], with more rows or columns."""
    expected = muon_formula(0.8, columns=shape[-1])
    found = stepped(Muon(momentum=0.8), shape=shape).reshape(SHAPE)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [SHAPE, (18,)], ids=["matrix", "vector"])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_muon_updates_other_parameters_by_nesterov_at_another_rate(shape, factor):
    found = stepped(Muon(momentum=0.8, other_factor=factor, other_weight_decay=0.0), shape=shape)
    expected = momentum_formula(0.8, nesterov=True, rate=RATE * factor).reshape(shape)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "shape, decay",
    [
        ([3, 3, 4, 4], 0.4),
        ([2, 3], 3.0 * 0.1),
        ([3], 0.0),
    ],
    ids=["kernel", "other matrix", "bias"],
)
def test_muon_has_two_decays(shape, decay):
    rule = Muon(weight_decay=0.4, other_weight_decay=0.1, other_factor=3.0)
    assert decayed_once(rule, shape) == pytest.approx(1 - RATE * decay)


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (16, 16), (48, 16), (16, 100), (27, 64), (576, 64)], ids=str)
def test_orthogonalized_has_singular_values_near_one(shape):
    """For random matrices. Singular values below 0.002 times the norm (of square matrices) may stay small."""
    for seed in range(5):
        matrix = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        given = np.linalg.svd(matrix, compute_uv=False)
        found = np.linalg.svd(orthogonalized(tf.constant(1e-3 * matrix)), compute_uv=False)
        assert found.max() < 1.25
        assert found[: np.sum(given > 0.002 * np.linalg.norm(given))].min() > 0.68


def test_orthogonalized_from_the_smallest_to_the_largest():
    """Matrices of norm 1 with two singular values; the smaller one is at least 0.002."""
    for share in np.geomspace(0.002, 1 / np.sqrt(2), 200):
        values = [share, np.sqrt(1 - share**2)]
        found = np.diag(orthogonalized(tf.constant(np.diag(values))))
        assert 0.68 < found.min() <= found.max() < 1.21


def test_orthogonalized_keeps_the_singular_vectors():
    matrix = np.random.default_rng(3).normal(size=(9, 4))
    np.testing.assert_allclose(orthogonalized(tf.constant(matrix)), orthogonalized_formula(matrix), atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)], ids=str)
def test_orthogonalized_zeros_are_zeros(shape):
    np.testing.assert_array_equal(orthogonalized(tf.zeros(shape)), np.zeros(shape))


def test_float64_is_not_rounded_to_float32():
    variable = tf.Variable(tf.ones([2], tf.float64))
    SGD().apply("x", variable, {}, tf.constant([1e-12, 0], tf.float64), tf.constant(1.0), tf.constant(0, tf.int64))
    assert 0 < 1 - variable.numpy()[0] < 1e-11


@pytest.mark.parametrize(
    "make, part",
    [
        (lambda: SGD(weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda: SGD(weight_decay=float("nan")), "weight_decay=nan"),
        (lambda: SGD(weight_decay=float("inf")), "weight_decay=inf"),
        (lambda: Momentum(momentum=1.0), "momentum=1.0"),
        (lambda: Momentum(momentum=-0.5), "momentum=-0.5"),
        (lambda: Muon(momentum=1.5), "momentum=1.5"),
        (lambda: Muon(other_weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda: Adam(beta_1=1.0), "beta_1=1.0"),
        (lambda: Adam(beta_2=2), "beta_2=2"),
        (lambda: Adam(epsilon=0.0), "epsilon=0.0"),
        (lambda: Adam(epsilon=-1e-7), "epsilon=-1e-07"),
        (lambda: Adam(epsilon=float("nan")), "epsilon=nan"),
    ],
)
def test_what_is_refused(make, part):
    with refused(part):
        make()
