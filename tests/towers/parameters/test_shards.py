"""Which device owns which part of a parameter, as arithmetic."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as drawn

from towers.parameters.shards import Shard, shards_of

VGG_LIKE = {
    "kernel1": (3, 3, 3, 64),
    "bias1": (64,),
    "kernel2": (3, 3, 64, 512),
    "table": (1000, 64),
    "out": (512, 10),
}


def shards(shapes, num_owners, whole=()):
    return shards_of(shapes, num_owners, item_bytes=dict.fromkeys(shapes, 4), whole=whole)


def elements(shapes, shard: Shard) -> int:
    shape = list(shapes[shard.name])
    if shard.dimension is not None:
        shape[shard.dimension] = shard.end - shard.begin
    return math.prod(shape)


def owned(shapes, found, num_owners) -> list[int]:
    return [sum(elements(shapes, shard) for shard in found if shard.owner == owner) for owner in range(num_owners)]


@pytest.mark.parametrize("num_owners", [1, 2, 3, 4, 8])
def test_the_fullest_has_at_most_a_tenth_more_than_the_mean(num_owners):
    found = owned(VGG_LIKE, shards(VGG_LIKE, num_owners), num_owners)
    assert max(found) <= 1.1 * sum(found) / num_owners


def test_a_kernel_is_sliced_by_output_channels_and_a_table_by_rows():
    found = {shard.name: shard.dimension for shard in shards(VGG_LIKE, 8) if shard.dimension is not None}
    assert found == {"kernel2": 3, "table": 0}


@given(
    shapes=drawn.lists(drawn.lists(drawn.integers(1, 9), max_size=4), min_size=1, max_size=6),
    num_owners=drawn.integers(1, 5),
    data=drawn.data(),
)
def test_every_element_is_owned_once_in_order(shapes, num_owners, data):
    shapes = {f"p{index}": tuple(shape) for index, shape in enumerate(shapes)}
    whole = data.draw(drawn.sets(drawn.sampled_from(sorted(shapes))))
    found = shards(shapes, num_owners, whole)
    assert list(dict.fromkeys(shard.name for shard in found)) == list(shapes)
    assert all(0 <= shard.owner < num_owners for shard in found)
    for name, shape in shapes.items():
        of_name = [shard for shard in found if shard.name == name]
        if len(of_name) == 1:
            assert of_name[0].dimension is None
            continue
        assert name not in whole
        assert len({shard.owner for shard in of_name}) == len(of_name)
        bounds = [(shard.begin, shard.end) for shard in of_name]
        assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == shape[of_name[0].dimension]


def test_parameters_that_must_stay_whole_go_largest_first():
    shapes = {"small": (1,), "large": (7,), "middle": (4,), "other": (4,)}
    found = shards(shapes, 2, whole=shapes)
    assert owned(shapes, found, 2) == [8, 8]
    assert [shard.dimension for shard in found] == [None] * 4
