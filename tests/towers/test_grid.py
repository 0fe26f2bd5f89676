"""Grids of devices."""

import pytest

from tests.towers.user_errors import refused
from towers.grid import Grid


def test_the_devices_of_each_tower():
    grid = Grid.parse("data:2,stage:3")
    assert grid == Grid(data=2, stage=3)
    assert grid.groups(("a", "b", "c", "d", "e", "f")) == (("a", "b", "c"), ("d", "e", "f"))
    assert Grid().groups(("a",)) == (("a",),)


@pytest.mark.parametrize("text", ["", "data", "data:", "data:-1", "rows:2", "data:2,data:3", "data=2"])
def test_a_text_that_is_no_grid(text):
    with refused(f"grid={text!r}: give each axis once"):
        Grid.parse(text)


def test_sizes_that_do_not_multiply_to_the_devices():
    with refused("grid='data:2,stage:2' needs 4 devices, but there are 3"):
        Grid(data=2, stage=2).groups(("a", "b", "c"))


def test_stages_of_slices():
    with refused("grid='stage:2,slice:2': a tower has stages, slices or branches; omit all but one"):
        Grid(stage=2, slice=2)


def test_an_empty_axis():
    with refused("grid='data:0': each axis must be at least 1"):
        Grid(data=0)
