"""Flags of a pipeline and its grid of devices."""

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import train  # noqa: F401, defines the flags
from launch.flags.grid import grid_from_flags
from launch.flags.pipeline import num_stage_devices, pipeline_from_flags
from tests.towers.user_errors import refused
from towers.grid import Grid


@pytest.fixture
def given():
    """Sets flags of a pipeline, by name."""
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()

        def set_flags(**settings):
            for name, value in {"strategy": "pipeline", **settings}.items():
                flags.FLAGS[name].value = value

        yield set_flags


@pytest.mark.parametrize(
    "settings, grid",
    [
        ({"strategy": "towers"}, None),
        ({}, Grid(stage=2)),
        ({"stages": 3, "num_towers": 2}, Grid(data=2, stage=3)),
        ({"grid": "data:2,stage:2", "stages": 4, "pipeline_schedule": "interleaved"}, Grid(data=2, stage=2)),
        ({"strategy": "ring"}, None),
        ({"strategy": "ring", "grid": "stage:3"}, Grid(stage=3)),
    ],
    ids=str,
)
def test_the_devices_of_each_tower(given, settings, grid):
    given(**settings)
    assert grid_from_flags(num_stage_devices()) == grid


def test_a_schedule_in_a_file(given, tmp_path, capfd):
    path = tmp_path / "own.csv"
    path.write_text("F0,F1,B0,B1\nF0,B0,F1,B1\n")
    given(pipeline_schedule=str(path), balance="5,3")
    assert grid_from_flags(num_stage_devices()) == Grid(stage=2)
    options = pipeline_from_flags()
    assert (options.balance, options.schedule.num_microbatches) == ((5, 3), 2)
    path.with_name("wrong.csv").write_text("F0,B0,F0\n")
    given(pipeline_schedule=str(path.with_name("wrong.csv")))
    with refused("wrong.csv, line 1, cell 3: F0 comes a second time"):
        pipeline_from_flags()
    drawn = capfd.readouterr().err.splitlines()
    assert drawn[1].split() == ["device", "0", "F0", "B0", "==", "F0!"]
    assert drawn[2].startswith("! device 0: F0 comes a second time")
    path.with_name("long.csv").write_text(",".join(f"F{index},B{index}" for index in range(30)) + ",F0\n")
    given(pipeline_schedule=str(path.with_name("long.csv")))
    with refused("F0 comes a second time"):
        pipeline_from_flags()
    assert [line[:1] for line in capfd.readouterr().err.splitlines()] == ["!"]
    given(pipeline_schedule="1f2b")
    with refused("--pipeline_schedule=1f2b: no such schedule and no such file"):
        pipeline_from_flags()
    given(pipeline_schedule="x" * 300)
    with refused("can't be read", "too long"):
        pipeline_from_flags()


@pytest.mark.parametrize("stages, is_even", [(2, False), (4, False), (3, True), (6, True)])
def test_stages_are_spread_evenly_over_the_devices_of_a_grid(given, stages, is_even):
    given(stages=stages, grid="data:2,stage:3", pipeline_schedule="interleaved")
    if is_even:
        assert pipeline_from_flags().stages == stages
        return
    with refused(
        f"--stages={stages} with --grid=data:2,stage:3: a tower of this grid has 3 devices", "omit --stages"
    ):
        pipeline_from_flags()


def test_a_ring_whose_towers_are_pipelines(given):
    given(strategy="ring")
    assert pipeline_from_flags() is None
    given(strategy="ring", microbatches=4)
    with refused("--microbatches=4 with --strategy=ring: its towers have no stages; add --grid=stage:2"):
        pipeline_from_flags()
    given(strategy="towers", stages=2)
    with refused(
        "--stages=2 with --strategy=towers: its towers have no stages; use --strategy=pipeline, or omit --st"
    ):
        pipeline_from_flags()
    given(strategy="ring", stages=None, grid="stage:2", microbatches=4)
    assert pipeline_from_flags().microbatches == 4
    given(strategy="ring", grid="data:2")
    with refused("--grid=data:2 with --strategy=ring: its towers are single devices", "--num_towers=2 instead"):
        pipeline_from_flags()


@pytest.mark.parametrize(
    "settings, parts",
    [
        ({"strategy": "towers", "pipeline_schedule": "gpipe"}, ("no stages; use --strategy=pipeline, or omit",)),
        ({"strategy": "ring", "pipeline_schedule": "gpipe"}, ("no stages; add --grid=stage:2, or omit",)),
        ({"strategy": "branches", "pipeline_schedule": "gpipe"}, ("no stages; use --strategy=pipeline",)),
        ({"strategy": "towers", "balance": "time"}, ("neither stages nor branches", "pipeline or branches")),
        ({"strategy": "ring", "grid": "slice:2", "balance": "time"}, ("neither stages nor branches",)),
    ],
    ids=str,
)
def test_a_flag_of_pipelines_for_other_towers(given, settings, parts):
    given(**settings)
    name = list(settings)[-1]
    with refused(f"--{name}={settings[name]} with --strategy={settings['strategy']}", *parts, f"omit --{name}"):
        pipeline_from_flags()
    given(strategy="branches", pipeline_schedule="1f1b", balance="time")
    assert pipeline_from_flags() is None


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"grid": "slice:2"}, "--grid=slice:2: --strategy=pipeline has stages, no slices"),
        ({"grid": "data:2,stage:2", "num_towers": 4}, "has 2 towers, --num_towers=4"),
        (
            {"grid": "data:2,stage:2", "strategy": "towers"},
            "--grid=data:2,stage:2 with strategy 'towers', whose towers are single",
        ),
        ({"grid": "rows:2", "strategy": "towers"}, "grid='rows:2': give each axis once"),
    ],
    ids=str,
)
def test_a_grid_that_does_not_fit(given, settings, message):
    given(**settings)
    with refused(message):
        grid_from_flags(2)
