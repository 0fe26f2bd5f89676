"""Global batch k is a pure function of (seed, k), however it is divided among readers."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.batch_stream import batches_per_epoch, derived_seed, eval_stream, shuffled, train_stream
from tests import tiers
from towers.errors import UserError
from towers.split import boundaries
from towers.task import InputShard

SIZES = {"num_examples": st.integers(1, 40), "batch_size": st.integers(1, 15), "seed": st.integers(0, 2**64)}
FEW = settings(max_examples=8 if tiers.runs_full else 4, deadline=None)


def batches(num_batches, *, num_examples, batch_size, seed, shard=None):
    stream = train_stream(
        lambda part: part.indices,
        num_examples=num_examples,
        batch_size=batch_size,
        seed=seed,
        shard=shard or InputShard(),
    )
    return [batch.tolist() for batch in stream.take(num_batches).as_numpy_iterator()]


@FEW
@given(**SIZES)
def test_every_epoch_has_every_example_once(num_examples, batch_size, seed):
    per_epoch = batches_per_epoch(num_examples, batch_size)
    read = batches(2 * per_epoch, num_examples=num_examples, batch_size=batch_size, seed=seed)
    for epoch in (read[:per_epoch], read[per_epoch:]):
        assert sorted(sum(epoch, [])) == list(range(num_examples))
        assert [len(batch) for batch in epoch[:-1]] == [batch_size] * (per_epoch - 1)


@FEW
@given(**SIZES, count=st.integers(1, 4), data=st.data())
def test_readers_parts_make_up_the_global_batch(num_examples, batch_size, seed, count, data):
    shares = data.draw(st.none() | st.tuples(*[st.floats(0.1, 5.0)] * count))
    sizes = {"num_examples": num_examples, "batch_size": batch_size, "seed": seed}
    whole = batches(4, **sizes)
    parts = [
        batches(4, **sizes, shard=InputShard(index=index, count=count, shares=shares)) for index in range(count)
    ]
    for index, batch in enumerate(whole):
        assert sum((part[index] for part in parts), []) == batch
        expected = np.diff(boundaries(len(batch), shares or (1.0,) * count)).tolist()
        assert [len(part[index]) for part in parts] == expected


@FEW
@given(**SIZES, first=st.integers(0, 9))
def test_a_stream_that_starts_later_skips_the_batches_before(num_examples, batch_size, seed, first):
    sizes = {"num_examples": num_examples, "batch_size": batch_size, "seed": seed}
    assert batches(3, **sizes, shard=InputShard(first_batch=first)) == batches(first + 3, **sizes)[first:]


def test_a_stream_can_start_at_a_far_batch():
    sizes = {"num_examples": 10**9, "batch_size": 4, "seed": 0}
    (batch,) = batches(1, **sizes, shard=InputShard(first_batch=10**11))
    assert len(set(batch)) == 4


def test_seeds_and_epochs_have_different_orders():
    orders = [
        sum(batches(2, num_examples=50, batch_size=25, seed=seed, shard=InputShard(first_batch=first)), [])
        for seed, first in ((0, 0), (1, 0), (2**40, 0), (0, 2))
    ]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.full
def test_epochs_are_as_independent_as_true_shuffles():
    # TensorFlow's default of 4 cipher rounds gives r = 0.75 here; independent epochs have |r| < 0.02.
    positions = tf.range(50_000, dtype=tf.int64)
    epochs = [
        shuffled(positions, seed=derived_seed(0, "order"), epoch=tf.constant(epoch, tf.int64), num_examples=50_000)
        for epoch in range(3)
    ]
    correlations = np.corrcoef(np.stack(epochs).astype(float))
    assert np.abs(correlations[np.triu_indices(3, 1)]).max() < 0.02


@pytest.mark.full
def test_small_permutations_are_all_drawn():
    positions = tf.range(3, dtype=tf.int64)
    counts = {}
    for epoch in range(600):
        order = shuffled(positions, seed=5, epoch=tf.constant(epoch, tf.int64), num_examples=3).numpy()
        counts[tuple(order)] = counts.get(tuple(order), 0) + 1
    assert len(counts) == 6 and min(counts.values()) > 60


def test_the_order_is_the_same_on_every_machine():
    # Fixed values: if they change, resumed runs see other batches.
    assert derived_seed(7, "order") == 112145761195356170
    assert batches(2, num_examples=7, batch_size=4, seed=7) == [[6, 3, 0, 1], [2, 5, 4]]


def test_evaluation_is_one_pass_in_order():
    stream = eval_stream(lambda part: part.indices, num_examples=7, batch_size=3, shard=InputShard())
    assert [batch.tolist() for batch in stream.as_numpy_iterator()] == [[0, 1, 2], [3, 4, 5], [6]]
    last = eval_stream(
        lambda part: part.indices,
        num_examples=7,
        batch_size=3,
        shard=InputShard(index=1, count=2, first_batch=1),
    )
    assert [batch.tolist() for batch in last.as_numpy_iterator()] == [[5], []]


def test_make_batch_is_given_the_batch_index_and_the_part():
    stream = train_stream(
        lambda part: (part.batch_index, part.begin, part.end),
        num_examples=10,
        batch_size=4,
        seed=0,
        shard=InputShard(index=1, count=2, first_batch=4),
    )
    # Batch 4 is the second batch of the second epoch. Batch 5 is its last one, of 2 examples.
    assert [tuple(map(int, part)) for part in stream.take(2)] == [(4, 2, 4), (5, 1, 2)]


@pytest.mark.parametrize("num_examples, batch_size", [(0, 4), (10, 0), (10, -1)])
def test_sizes_below_one_are_refused_in_one_line(num_examples, batch_size):
    with pytest.raises(UserError) as error:
        batches(1, num_examples=num_examples, batch_size=batch_size, seed=0)
    assert "\n" not in str(error.value)
