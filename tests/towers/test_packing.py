"""Packs: each tensor is in exactly one, in order from the last to the first, and no pack exceeds its limit."""

import itertools

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as drawn

from towers.packing import joined, packs, parted

sizes = drawn.lists(drawn.integers(0, 40), max_size=30)
limits = drawn.integers(1, 60)
shapes = drawn.lists(drawn.lists(drawn.integers(0, 4), max_size=3), min_size=1, max_size=6)


def test_the_example_of_the_docstring():
    """The table at the top of towers/packing.py."""
    assert packs([4, 4, 2, 6, 3], 8) == [(4,), (3, 2), (1, 0)]


def test_without_tensors_there_is_no_pack():
    assert packs([], 8) == []


@given(sizes, limits)
def test_every_tensor_is_in_one_pack_last_first(sizes_bytes, limit):
    assert list(itertools.chain(*packs(sizes_bytes, limit))) == list(reversed(range(len(sizes_bytes))))


@given(sizes, limits)
def test_a_pack_holds_its_limit_unless_one_tensor_is_larger(sizes_bytes, limit):
    for pack in packs(sizes_bytes, limit):
        assert pack, "an empty pack would be a collective of nothing"
        assert sum(sizes_bytes[index] for index in pack) <= limit or len(pack) == 1


@given(sizes, limits)
def test_a_pack_ends_only_where_the_next_tensor_has_no_room(sizes_bytes, limit):
    for pack, following in itertools.pairwise(packs(sizes_bytes, limit)):
        assert sum(sizes_bytes[index] for index in pack) + sizes_bytes[following[0]] > limit


@settings(max_examples=40, deadline=None)
@given(shapes, drawn.sampled_from([tf.float32, tf.bfloat16, tf.int64]))
def test_parted_is_the_inverse_of_joined(all_shapes, dtype):
    draw = np.random.default_rng(len(all_shapes))
    tensors = [tf.cast(tf.constant(100 * draw.normal(size=shape)), dtype) for shape in all_shapes]
    vector = joined(tensors)
    assert vector.shape == [sum(tensor.shape.num_elements() for tensor in tensors)]
    for found, tensor in zip(parted(vector, tensors), tensors, strict=True):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(found.numpy(), tensor.numpy())


def test_joined_is_in_order():
    vector = joined([tf.constant([[1, 2], [3, 4]]), tf.constant(5), tf.constant([6])])
    assert vector.numpy().tolist() == [1, 2, 3, 4, 5, 6]
