"""What is said of a pipeline that ran: from actions with known times."""

import pytest

from towers.pipeline import builders
from towers.pipeline.simulator import simulate
from towers.pipeline.timeline import StageSeconds
from towers.timeline.activities import Activity, Work
from towers.timeline.intervals import Interval
from towers.timeline.operations import Transfer
from towers.timeline.pipeline_run import (
    described,
    gpipe_bubble,
    pipeline_runs,
    predicted_seconds,
    schedule_name,
    stage_seconds,
)

# Numbers that binary fractions hold exactly.
STAGES = [StageSeconds(0.25, 0.5, 0.125, 0.0625), StageSeconds(0.125, 0.25, 0.0625)]


def ran(name: str, num_microbatches: int = 4, stages=STAGES, steps: int = 2):
    """The pipelines of `steps` steps that took exactly the simulated times."""
    schedule = builders.build(name, num_devices=2, num_stages=len(stages), num_microbatches=num_microbatches)
    played = simulate(schedule, stages)
    return pipeline_runs(
        Interval(
            100.0 * step + timed.start_seconds,
            100.0 * step + timed.end_seconds,
            f"CPU:{device}",
            step,
            Activity(Work.FORWARD, 0, timed.action),
        )
        for step in range(steps)
        for device, actions in enumerate(played.devices)
        for timed in actions
    ), played


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_the_stages_times_are_found_and_simulate_what_ran(name):
    runs, played = ran(name)
    sent = [Transfer(1.0, 1.0625, "tower_0/action_0F0/PartitionedCall/x", "CPU:0", "CPU:1")]
    found = stage_seconds(runs, sent)
    assert [run.step for run in runs] == [0, 1]
    assert schedule_name(runs[0].timeline.schedule) == name
    assert simulate(runs[0].timeline.schedule, found).total_seconds == played.total_seconds
    assert runs[1].timeline.bubble_share == played.bubble_share


def test_the_bubble_of_equal_stages_is_gpipes():
    equal = [StageSeconds(1.0, 1.0, 1.0)] * 2
    runs, played = ran("gpipe", 8, equal)
    assert runs[0].timeline.bubble_share == pytest.approx(gpipe_bubble(played.schedule)) == pytest.approx(1 / 9)


def test_more_stages_are_predicted_from_the_same_work():
    """GPipe with K equal stages takes (M + K - 1) times a microbatch's time in one of them."""
    equal = [StageSeconds(2.0, 3.0, 1.0)] * 2
    runs, played = ran("gpipe", 8, equal)
    for count in (4, 8):
        found = predicted_seconds("gpipe", played.schedule, equal, count)
        assert found == pytest.approx((8 + count - 1) * 12.0 / count)
    lines = described(runs, played.total_seconds + 1.0)
    assert lines[-1].endswith(f"4 devices {1e3 * (11 * 3 + 1):.0f} ms, 8 devices {1e3 * (15 * 1.5 + 1):.0f} ms")
    assert "bubble: measured 11.1%, simulated 11.1%, with equal stages 11.1%" in lines[-2]


def test_interleaved_stages_stay_on_their_devices():
    runs, played = ran("interleaved", 4, [*STAGES, *STAGES])
    assert runs[0].timeline.schedule == played.schedule
    assert runs[0].devices == ("CPU:0", "CPU:1")
