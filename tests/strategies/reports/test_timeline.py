"""The timeline of a real pipeline's steps: intervals, Chrome trace, picture, and what is refused before a run."""

import itertools
import json
import struct

import pytest

from strategies.pipeline import pipeline_strategy
from strategies.reports.timeline import PICTURE, TRACE, TimelineOfSteps
from strategies.reports.timeline_picture import DPI, WIDTH
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions
from tests.strategies.small_task import small_strategy, small_task
from tests.towers.logical_cpus import cpus
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.pipeline import builders
from towers.stages.options import PipelineOptions

MICROBATCHES = 4
NUM_STEPS = 2


def trained(strategy, directory, *, first=2, steps=6):
    """Trains; returns the lines printed about steps `first` and `first + 1`."""
    said = []
    options = TrainerOptions(steps=steps, directory=directory, evaluate_every_epochs=None)
    Trainer(strategy, options, callbacks=[TimelineOfSteps(first, first + NUM_STEPS, say=said.append)]).fit()
    return said


def pipeline(schedule: str):
    options = PipelineOptions(microbatches=MICROBATCHES, schedule=schedule)
    return pipeline_strategy(small_task(depth=3, width=256), cpus(2), StepOptions(), pipeline=options)


@pytest.fixture(scope="module", params=["1f1b", pytest.param("zb_h1", marks=pytest.mark.full)])
def run(request, tmp_path_factory):
    """(schedule's name, run's directory, printed lines)"""
    directory = tmp_path_factory.mktemp("timeline") / "run"
    return request.param, directory, trained(pipeline(request.param), directory)


def events(directory, phase):
    found = json.loads((directory / TRACE).read_text())["traceEvents"]
    return [event for event in found if event["ph"] == phase]


def row_names(directory):
    return {
        event["tid"]: event["args"]["name"] for event in events(directory, "M") if event["name"] == "thread_name"
    }


def test_each_device_takes_all_actions_of_the_schedule_in_its_order(run):
    name, directory, _ = run
    schedule = builders.build(name, num_devices=2, num_stages=2, num_microbatches=MICROBATCHES)
    rows = row_names(directory)
    known = {str(action) for actions in schedule.devices for action in actions}
    for step in (2, 3):
        for device, actions in enumerate(schedule.devices):
            of_row = [
                event
                for event in events(directory, "X")
                if rows[event["tid"]] == f"CPU:{device}" and event["args"].get("step") == step
            ]
            taken = [event["name"] for event in sorted(of_row, key=lambda event: event["ts"])]
            assert [one for one in taken if one in known] == [str(action) for action in actions]


def test_the_intervals_of_a_row_do_not_overlap(run):
    _, directory, _ = run
    rows = row_names(directory)
    assert set(rows.values()) == {"steps", "CPU:0", "CPU:1", "input"}
    for row in rows:
        times = sorted((event["ts"], event["dur"]) for event in events(directory, "X") if event["tid"] == row)
        assert times
        for (begin, lasting), (following, _) in itertools.pairwise(times):
            assert begin + lasting <= following + 1e-3


def test_it_has_the_step_the_update_the_batch_and_the_transfers(run):
    _, directory, _ = run
    kinds = [event["cat"] for event in events(directory, "X")]
    assert kinds.count("step") == kinds.count("reading the batch") == NUM_STEPS
    assert {"forward", "backward", "update"} <= set(kinds)
    sent, arrived = (events(directory, phase) for phase in ("s", "f"))
    assert len(sent) == len(arrived) >= 2 * MICROBATCHES * NUM_STEPS
    assert all(one["tid"] != other["tid"] for one, other in zip(sent, arrived, strict=True))


def test_the_picture_has_its_width(run):
    _, directory, _ = run
    header = (directory / PICTURE).read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert struct.unpack(">I", header[16:20]) == (WIDTH * DPI,)


def test_the_bubble_is_said(run):
    name, _, said = run
    assert said[0].startswith("timeline of steps 2 to 3: ")
    assert said[1].startswith("stage 0 on CPU:0: for each microbatch forward")
    assert ("weight gradients" in said[1]) == (name == "zb_h1")
    assert "GPipe's (K-1)/(M+K-1) is 20.0%" in said[4]
    assert "4 devices" in said[5]


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"accumulation": 2}], ids=str)
def test_towers_pass_forward_then_backward_then_update(options, tmp_path):
    said = trained(small_strategy(num_towers=2, **options), tmp_path / "run")
    assert len(said) == 1
    rows = row_names(tmp_path / "run")
    kinds = {(rows[event["tid"]], event["cat"]) for event in events(tmp_path / "run", "X")}
    assert {(f"CPU:{k}", kind) for k in (0, 1) for kind in ("forward", "backward")} <= kinds
    assert ("CPU:0", "update") in kinds


def test_what_can_not_be_drawn_is_refused_before_the_run(tmp_path, monkeypatch):
    strategy = small_strategy()
    with refused("timeline_steps=0:2: this run has steps 0 to 5"):
        trained(strategy, tmp_path / "run", first=0)
    with refused("timeline_steps=5:7: this run has steps 0 to 5"):
        trained(strategy, tmp_path / "run", first=5)
    (tmp_path / "run" / PICTURE).mkdir(parents=True)
    with refused(f"{tmp_path}/run/{PICTURE}: can't be written: move it away"):
        trained(strategy, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [PICTURE]
    with refused("timeline_steps=3:3: give FIRST:LAST"):
        TimelineOfSteps(3, 3)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("timeline_steps=2:4: matplotlib is not installed"):
        trained(strategy, tmp_path / "other")
