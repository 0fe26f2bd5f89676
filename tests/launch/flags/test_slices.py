"""Flags of slices and of the grid: which devices form a tower, and what is refused."""

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import train  # noqa: F401, defines the flags
from launch.flags.slices import sliced_grid, slices_from_flags
from tests.towers.user_errors import refused
from towers.grid import Grid


@pytest.fixture
def given():
    """Sets flags for a test."""
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()

        def set_all(**settings):
            for name, value in settings.items():
                flags.FLAGS[name].value = value

        yield set_all


@pytest.mark.parametrize(
    "settings, grid",
    [
        ({"strategy": "towers"}, None),
        ({"strategy": "slices"}, Grid(slice=2)),
        ({"strategy": "slices", "slices": 3, "num_towers": 2}, Grid(data=2, slice=3)),
        ({"strategy": "slices", "grid": "data:2,slice:4", "slices": 4}, Grid(data=2, slice=4)),
        ({"strategy": "ring", "grid": "data:2,slice:2", "layout": ["logits=whole"]}, Grid(data=2, slice=2)),
        ({"strategy": "ring", "grid": "stage:2"}, None),
    ],
)
def test_devices_of_a_tower(given, settings, grid):
    given(**settings)
    assert sliced_grid() == grid


@pytest.mark.parametrize(
    "settings, parts",
    [
        ({"strategy": "slices", "grid": "data:2"}, ("--grid=data:2", "slice:2 or more")),
        ({"strategy": "slices", "grid": "slice:3", "slices": 2}, ("--slices=2 with --grid=slice:3", "omit one")),
        ({"strategy": "slices", "grid": "slice:3", "num_towers": 2}, ("--num_towers=2", "the grid says 1")),
        (
            {"strategy": "towers", "show_layout": True},
            ("--show_layout with --strategy=towers", "--strategy=slices"),
        ),
        ({"strategy": "ring", "layout": ["logits=whole"]}, ("--layout with --strategy=ring", "--grid=slice:2")),
        ({"strategy": "ring", "grid": "slice:2", "show_layout": True}, ("--show_layout with --strategy=ring",)),
    ],
)
def test_flags_that_contradict_each_other(given, settings, parts):
    given(**settings)
    with refused(*parts):
        sliced_grid()


def test_the_layout(given):
    given(strategy="slices", layout=["logits=whole", "block_*/mlp_up = columns"])
    assert slices_from_flags().layout == (("logits", "whole"), ("block_*/mlp_up", "columns"))
    given(layout=["logits"])
    with refused("--layout: 'logits'", "PATTERN=SPLIT"):
        slices_from_flags()
