"""The drawn clicks: a pure function of split and index, ids by the power law, labels by the stated logit."""

import hashlib

import numpy as np
import pytest
import tensorflow as tf

from models.data.drawn_clicks import DrawnClicks
from towers.errors import UserError

MANY = 200_000
# First 16 digits of SHA-256 of the features' and labels' bytes.
SHA256 = "e76bf9890883f581"


def drawn(indices, split="train", **sizes):
    """Features and labels of these examples, as arrays."""
    features, labels = DrawnClicks(**sizes).gather(split, tf.constant(indices, tf.int64))
    return {name: column.numpy() for name, column in features.items()}, labels.numpy()


@pytest.fixture(scope="module")
def many():
    return drawn(np.arange(MANY))


def test_numbers_are_the_same_on_every_machine():
    features, labels = drawn(np.arange(1000))
    digest = hashlib.sha256(b"".join(features[name].tobytes() for name in sorted(features)) + labels.tobytes())
    assert digest.hexdigest()[:16] == SHA256


def test_a_graph_draws_the_same_as_eager_operations():
    """TensorFlow rounds large uint64 constants in graphs if they are lists of Python's numbers."""
    indices = tf.range(100, dtype=tf.int64)
    features, labels = tf.function(DrawnClicks().gather, autograph=False)("train", indices)
    expected = drawn(np.arange(100))
    for name, column in features.items():
        np.testing.assert_array_equal(column, expected[0][name], err_msg=name)
    np.testing.assert_array_equal(labels, expected[1])


def test_an_example_does_not_depend_on_the_others_in_the_batch(many):
    indices = np.array([199_999, 7, 7, 0, 123_456])
    features, labels = drawn(indices)
    for name, column in features.items():
        np.testing.assert_array_equal(column, many[0][name][indices], err_msg=name)
    np.testing.assert_array_equal(labels, many[1][indices])


def test_train_and_eval_examples_differ():
    train, evaluation = (drawn(np.arange(1000), split)[0] for split in ("train", "eval"))
    assert not np.intersect1d(train["dense"], evaluation["dense"]).size


def test_no_examples_are_drawn_for_an_empty_part():
    features, labels = drawn([])
    assert features["dense"].shape == (0, 4) and features["ids_0"].shape == (0,) and labels.shape == (0,)


def test_ids_follow_the_power_law(many):
    """P(id = r) = ((r + 1) / rows)**(1/4) - (r / rows)**(1/4), within 5 deviations of the binomial's."""
    rows = DrawnClicks().num_rows
    for name in DrawnClicks().id_names:
        frequencies = np.bincount(many[0][name], minlength=rows) / MANY
        for first, after in [(0, 1), (1, 2), (2, 3), (3, 4), (100, 200), (rows // 2, rows)]:
            expected = (after / rows) ** 0.25 - (first / rows) ** 0.25
            deviation = np.sqrt(expected * (1 - expected) / MANY)
            assert abs(frequencies[first:after].sum() - expected) < 5 * deviation, (name, first)


@pytest.mark.parametrize("num_rows", [1, 3, 2**31 - 1])
def test_every_id_is_within_its_table(num_rows):
    features, _ = drawn(np.arange(MANY), num_tables=2, num_rows=num_rows)
    for name in ("ids_0", "ids_1"):
        assert features[name].dtype == np.int32
        assert features[name].min() >= 0 and features[name].max() < num_rows
    assert num_rows > 3 or np.unique(features["ids_0"]).size == num_rows


def test_columns_are_independent(many):
    columns = np.stack([*many[0]["dense"].T, *(np.log1p(many[0][name]) for name in DrawnClicks().id_names)])
    correlations = np.corrcoef(columns)
    assert np.abs(correlations[np.triu_indices(len(columns), 1)]).max() < 5 / np.sqrt(MANY)


def test_dense_numbers_are_standard(many):
    np.testing.assert_allclose(many[0]["dense"].mean(0), 0, atol=0.01)
    np.testing.assert_allclose(many[0]["dense"].std(0), 1, atol=0.01)


def test_labels_are_drawn_with_the_probability_of_the_logit(many):
    """In each of 20 groups of similar logits, the share of clicks is the mean probability."""
    clicks = DrawnClicks()
    ids = tf.stack([tf.constant(many[0][name], tf.int64) for name in clicks.id_names], axis=1)
    logits = clicks.logits(ids, tf.constant(many[0]["dense"], tf.float64)).numpy()
    order = np.argsort(logits)
    for group in np.array_split(order, 20):
        expected = 1 / (1 + np.exp(-logits[group]))
        deviation = np.sqrt((expected * (1 - expected)).sum()) / len(group)
        assert abs(many[1][group].mean() - expected.mean()) < 5 * deviation
    assert 0.2 < many[1].mean() < 0.3


def test_more_tables_change_no_other_column():
    few, more = (drawn(np.arange(10), num_tables=count)[0] for count in (2, 5))
    np.testing.assert_array_equal(few["ids_1"], more["ids_1"])
    np.testing.assert_array_equal(few["dense"], more["dense"])


@pytest.mark.parametrize(
    "sizes", [{"num_tables": 0}, {"num_rows": 0}, {"num_rows": 2**31}, {"num_dense": 0}, {"num_train": 0}]
)
def test_wrong_sizes_are_refused(sizes):
    with pytest.raises(UserError) as error:
        DrawnClicks(**sizes)
    assert next(iter(sizes)) in str(error.value) and "\n" not in str(error.value)
