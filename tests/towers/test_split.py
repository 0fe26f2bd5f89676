"""Splits: every example in exactly one part, for any number of examples and any shares."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as drawn

from tests import tiers
from tests.towers.user_errors import refused
from towers import split
from towers.input.tower_parts import PartsOfWorkers
from towers.task import Batch, InputShard, batch_length, examples_between

# Shares are whole tenths, so that exact fractions can be computed for comparison.
shares = drawn.lists(drawn.integers(1, 100), min_size=1, max_size=9).map(lambda s: tuple(x / 10 for x in s))
num_examples = drawn.integers(1, 100_000)


def exact_boundaries(count, given_shares):
    """ceil(count * cumulative share), computed with fractions and so without rounding."""
    tenths = [Fraction(round(share * 10)) for share in given_shares]
    ends = [sum(tenths[: index + 1]) for index in range(len(tenths))]
    return [0, *(math.ceil(count * end / ends[-1]) for end in ends)]


@given(num_examples, shares)
def test_parts_are_a_partition(count, given_shares):
    boundaries = split.boundaries(count, given_shares)
    assert boundaries[0] == 0 and boundaries[-1] == count
    assert boundaries == sorted(boundaries)
    assert split.sizes(count, given_shares) == list(np.diff(boundaries))


@given(num_examples, shares)
def test_boundaries_are_the_exact_ceilings(count, given_shares):
    assert split.boundaries(count, given_shares) == exact_boundaries(count, given_shares)


@given(num_examples, shares)
def test_sizes_are_within_one_of_the_shares(count, given_shares):
    for size, share in zip(split.sizes(count, given_shares), given_shares, strict=True):
        assert abs(size - count * share / sum(given_shares)) < 1 + 1e-6


@given(num_examples, shares)
def test_part_0_is_never_empty(count, given_shares):
    assert split.sizes(count, given_shares)[0] >= 1


@given(num_examples, drawn.integers(1, 16))
def test_even_sizes_differ_by_at_most_one(count, parts):
    sizes = split.sizes(count, split.even_shares(parts))
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60 if tiers.runs_full else 15, deadline=None)
@given(num_examples, shares)
def test_the_graph_has_the_same_boundaries(count, given_shares):
    begins, ends = [], []
    for index in range(len(given_shares)):
        found = split.bounds_in_graph(tf.constant(count), given_shares, index)
        assert found == split.bounds_in_graph(tf.constant(count), given_shares, tf.constant(index))
        assert found[1].dtype == tf.int32
        begins.append(int(found[0]))
        ends.append(int(found[1]))
    assert [*begins, ends[-1]] == [0, *ends] == split.boundaries(count, given_shares)


@pytest.mark.parametrize(
    "count, given_shares, sizes",
    [
        (5, (1, 1, 1, 1), [2, 1, 1, 1]),
        (1, (1, 1, 1, 1), [1, 0, 0, 0]),
        (7, (5, 3, 2), [4, 2, 1]),
        (0, (1, 1), [0, 0]),
        (30, (5, 3, 2), [15, 9, 6]),
    ],
)
def test_sizes_of_example_batches(count, given_shares, sizes):
    assert split.sizes(count, given_shares) == sizes


def test_checked_shares():
    assert split.checked_shares(None, 3, "tower_shares") == (1.0, 1.0, 1.0)
    assert split.checked_shares([5, 3, 2], 3, "tower_shares") == (5.0, 3.0, 2.0)


@pytest.mark.parametrize(
    "given_shares, parts",
    [
        ((5, 3), ["tower_shares=5,3", "2 shares for 3 towers"]),
        ((5, 3, 0), ["tower_shares=5,3,0", "positive"]),
        ((5, 3, -1), ["tower_shares=5,3,-1"]),
        ((5, 3, float("nan")), ["5,3,nan"]),
        ((5, 3, float("inf")), ["5,3,inf"]),
    ],
)
def test_shares_that_are_refused(given_shares, parts):
    with refused(*parts):
        split.checked_shares(given_shares, 3, "tower_shares")


def test_a_batch_smaller_than_the_towers():
    with refused("4 towers for a batch of 3", "num_towers=3"):
        split.check_batch_size(3, 1, split.even_shares(4), 4)
    # num_towers are those of one process.
    with refused("example; use at most 3 towers in all processes together, or a batch of 4 examples"):
        split.check_batch_size(3, 1, split.even_shares(4), 2)


def test_a_share_too_small_for_the_batch():
    with refused("tower_shares=50,0.1: a tower gets no example of a batch of 2", "raise batch_size"):
        split.check_batch_size(2, 1, (50.0, 0.1))
    split.check_batch_size(2, 1, (0.1, 50.0))


def test_microbatches_too_small_for_the_towers():
    with refused("accumulation=4 for a batch of 3", "accumulation=3"):
        split.check_batch_size(3, 4, (1.0,))
    with refused("3 towers for a microbatch (accumulation=4) of 2", "num_towers=2"):
        split.check_batch_size(8, 4, split.even_shares(3))


@pytest.mark.parametrize("count", [1, 7, 10, 16])
def test_parts_of_workers_are_those_that_each_worker_cuts_from_its_own(count):
    shares_by_worker = ((1.0, 1.0, 1.0), (4.0, 2.0), (1.0,))
    whole = Batch(tf.range(count), tf.range(count))
    expected = []
    for index, shares_of_towers in enumerate(shares_by_worker):
        shard = InputShard(index=index, count=3, shares=tuple(map(sum, shares_by_worker)))
        own = examples_between(whole, *shard.bounds(tf.constant(count)))
        ends = split.boundaries(int(batch_length(own)), shares_of_towers)
        expected += [own.features[begin:end].numpy().tolist() for begin, end in itertools.pairwise(ends)]
    parts = PartsOfWorkers.of(shares_by_worker)
    found = [parts.part(whole, tower) for tower in range(len(parts.shares))]
    assert [own.features.numpy().tolist() * bool(activity) for own, activity in found] == expected


def test_parts_of_workers_are_others_than_those_of_all_towers_at_once():
    parts, batch = PartsOfWorkers.of([(1.0, 1.0)] * 3), Batch(tf.range(10), tf.range(10))
    assert [int(batch_length(parts.part(batch, tower)[0])) for tower in range(6)] == [2, 2, 2, 1, 2, 1]
    assert split.sizes(10, split.even_shares(6)) == [2, 2, 1, 2, 2, 1]
