"""Flags of branches and of the grid: which devices form a tower, and what is refused."""

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import train  # noqa: F401, defines the flags
from launch.flags.branches import branched_grid, branches_from_flags
from launch.flags.grid import grid_from_flags
from launch.flags.slices import sliced_grid
from tests.towers.user_errors import refused
from towers.branches.options import BranchOptions
from towers.grid import Grid


@pytest.fixture
def given():
    """Sets flags for a test."""
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()

        def set_all(**settings):
            for name, value in {"strategy": "branches", **settings}.items():
                flags.FLAGS[name].value = value

        yield set_all


@pytest.mark.parametrize(
    "settings, grid",
    [
        ({"strategy": "towers"}, None),
        ({}, Grid(branch=2)),
        ({"branch_devices": 3, "num_towers": 2}, Grid(data=2, branch=3)),
        ({"grid": "data:2,branch:4", "branch_devices": 4}, Grid(data=2, branch=4)),
        ({"strategy": "ring", "grid": "data:2,branch:2"}, Grid(data=2, branch=2)),
        ({"strategy": "ring", "grid": "stage:2"}, None),
    ],
    ids=str,
)
def test_devices_of_a_tower(given, settings, grid):
    given(**settings)
    assert branched_grid() == grid
    assert sliced_grid() is None
    assert (branches_from_flags() is None) == (grid is None)


@pytest.mark.parametrize(
    "settings, parts",
    [
        ({"grid": "data:2"}, ("--grid=data:2", "branch:2 or more")),
        ({"grid": "slice:2"}, ("--grid=slice:2", "branch:2 or more")),
        ({"grid": "branch:3", "branch_devices": 2}, ("--branch_devices=2 with --grid=branch:3", "omit one")),
        ({"grid": "branch:3", "num_towers": 2}, ("--num_towers=2", "the grid says 1")),
        ({"strategy": "towers", "branch_devices": 2}, ("--branch_devices with --strategy=towers", "use that")),
    ],
    ids=str,
)
def test_flags_that_contradict_each_other(given, settings, parts):
    given(**settings)
    with refused(*parts):
        branched_grid()


def test_other_strategies_refuse_its_axis(given):
    given(strategy="pipeline", grid="branch:2")
    with refused("--grid=branch:2: --strategy=pipeline has stages, no branches; use stage:N"):
        grid_from_flags(2)


def test_the_balance(given):
    given(balance="time", show_layout=True)
    assert branches_from_flags() == BranchOptions(balance="time")
    assert sliced_grid() is None, "show_layout is for branches too"
    given(strategy="pipeline")
    assert branches_from_flags() is None
    given(balance="5,3")
    with refused("balance='5,3' with branches: use one of parameters, time"):
        branches_from_flags()
