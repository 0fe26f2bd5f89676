"""The drawn texts: a pure function of split and index, tokens by the stated chain, whose entropy is arithmetic."""

import hashlib

import numpy as np
import pytest
import tensorflow as tf

from models.data.drawn_text import DrawnText
from tests.tiers import first_quick
from towers.errors import UserError

MANY = 5_000
# First 16 digits of SHA-256 of the labels' bytes.
SHA256 = "438665748aa6568b"


def drawn(indices, split="train", **sizes):
    """Tokens and labels, as arrays; drawn in a graph, as tf.data does."""
    tokens, labels = tf.function(DrawnText(**sizes).gather, autograph=False)(split, tf.constant(indices, tf.int64))
    return tokens.numpy(), labels.numpy()


def chances(text: DrawnText, before: np.ndarray, last: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Probability of each token after the two before it, by the module's table."""
    favourite, usual = (likely.numpy() for likely in text.likely_tokens(tf.constant(before), tf.constant(last)))
    other = 1 / (4 * (text.num_tokens - 3))
    return np.where(token == favourite, 1 / 2, np.where(token == usual, 1 / 4, other))


@pytest.fixture(scope="module")
def many():
    return drawn(np.arange(MANY))


@pytest.fixture(scope="module")
def contexts(many):
    """The valid tokens of all texts, with the two tokens before each: (before, last, token), int64."""
    labels = many[1].astype(np.int64)
    padded = np.pad(labels, [(0, 0), (2, 0)])
    valid = labels > 0
    return padded[:, :-2][valid], padded[:, 1:-1][valid], labels[valid]


def test_numbers_are_the_same_on_every_machine():
    _, labels = drawn(np.arange(1000))
    assert hashlib.sha256(labels.astype(np.int32).tobytes()).hexdigest()[:16] == SHA256


def test_a_graph_draws_the_same_as_eager_operations():
    """TensorFlow rounds large uint64 constants in graphs if they are lists of Python's numbers."""
    eagerly = DrawnText(length=5).gather("train", tf.range(50, dtype=tf.int64))
    for one, other in zip(eagerly, drawn(np.arange(50), length=5), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_text_does_not_depend_on_the_others_in_the_batch(many):
    indices = np.array([4_999, 7, 7, 0, 123])
    for one, other in zip(drawn(indices), many, strict=True):
        np.testing.assert_array_equal(one, other[indices])


def test_train_and_eval_texts_differ():
    train, evaluation = (drawn(np.arange(200), split, length=12)[1] for split in ("train", "eval"))
    assert not {text.tobytes() for text in train} & {text.tobytes() for text in evaluation}


def test_no_texts_are_drawn_for_an_empty_part():
    tokens, labels = drawn([], length=3)
    assert tokens.shape == labels.shape == (0, 3)


@pytest.mark.parametrize("length", first_quick([7, 1, 2]))
def test_a_longer_text_begins_with_the_shorter_one(length, many):
    _, labels = drawn(np.arange(100), length=length)
    valid = labels > 0
    np.testing.assert_array_equal(labels[valid], many[1][:100, :length][valid])


def test_tokens_are_the_labels_before_them(many):
    tokens, labels = many
    assert (tokens.dtype, labels.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(tokens, np.pad(labels[:, :-1], [(0, 0), (1, 0)]))


def test_lengths_are_uniform_and_the_padding_follows_the_text(many):
    """33 lengths, within 5 deviations of the binomial's."""
    valid = many[1] > 0
    lengths = valid.sum(1)
    np.testing.assert_array_equal(valid, np.arange(64) < lengths[:, None])
    counts = np.bincount(lengths, minlength=65)
    assert counts[:32].sum() == 0
    deviation = np.sqrt(MANY / 33 * 32 / 33)
    assert np.abs(counts[32:] - MANY / 33).max() < 5 * deviation


def test_tokens_follow_the_chain(contexts):
    """Within 5 deviations: shares of 1/2, 1/4 and the rest, in which all tokens are as frequent."""
    text, (before, last, token) = DrawnText(), contexts
    found = chances(text, before, last, token)
    for chance, expected in ((1 / 2, 1 / 2), (1 / 4, 1 / 4), (1 / 116, 1 / 4)):
        deviation = np.sqrt(expected * (1 - expected) / token.size)
        assert abs(np.mean(found == chance) - expected) < 5 * deviation
    others = np.bincount(token[found == 1 / 116], minlength=32)[1:]
    assert others.min() > 0.8 * others.mean() and others.max() < 1.2 * others.mean()


def test_the_entropy_is_that_of_the_chain(contexts):
    text = DrawnText()
    surprise = -np.log(chances(text, *contexts))
    assert abs(surprise.mean() - text.entropy) < 5 * surprise.std() / np.sqrt(surprise.size)
    # The entropy of the whole distribution after one pair of tokens.
    distribution = chances(text, np.full(31, 5), np.full(31, 9), np.arange(1, 32))
    assert distribution.sum() == pytest.approx(1)
    assert -(distribution * np.log(distribution)).sum() == pytest.approx(text.entropy)


@pytest.mark.parametrize("num_tokens", first_quick([2**31 - 1, 4]))
def test_every_token_is_within_the_vocabulary(num_tokens):
    _, labels = drawn(np.arange(1000), num_tokens=num_tokens, length=8)
    assert labels.min() == 0 and labels.max() < num_tokens
    assert num_tokens > 4 or np.unique(labels).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "sizes", [{"num_tokens": 3}, {"num_tokens": 2**31}, {"length": 0}, {"num_train": 0}, {"num_eval": 0}]
)
def test_wrong_sizes_are_refused(sizes):
    with pytest.raises(UserError) as error:
        DrawnText(**sizes)
    assert next(iter(sizes)) in str(error.value) and "\n" not in str(error.value)
