"""Timelines: every action starts as early as its device and its inputs allow, never earlier."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as drawn

from tests.towers.user_errors import refused
from towers.pipeline.builders import NAMES, build, gpipe, one_forward_one_backward
from towers.pipeline.schedule import Schedule
from towers.pipeline.simulator import simulate
from towers.pipeline.timeline import EQUAL_SECONDS, StageSeconds, play

times = drawn.integers(0, 9).map(float)
stage_seconds = drawn.builds(StageSeconds, times, times, times, times)


@drawn.composite
def cases(draw):
    name, devices, each = draw(drawn.sampled_from(NAMES)), draw(drawn.integers(1, 4)), draw(drawn.integers(1, 3))
    stages = devices * (each if name == "interleaved" else 1)
    schedule = build(name, num_devices=devices, num_stages=stages, num_microbatches=draw(drawn.integers(1, 6)))
    return schedule, draw(drawn.lists(stage_seconds, min_size=stages, max_size=stages))


@settings(max_examples=40, deadline=None)
@given(cases())
def test_each_action_starts_as_early_as_it_can(case):
    schedule, seconds = case
    timeline = simulate(schedule, seconds)
    placed = {timed.action: timed for actions in timeline.devices for timed in actions}
    for device, actions in enumerate(timeline.devices):
        free = 0.0
        for timed in actions:
            arrivals = [
                placed[need].end_seconds
                + (
                    seconds[min(need.stage, timed.action.stage)].transfer_seconds
                    if schedule.stage_devices[need.stage] != device
                    else 0.0
                )
                for need in timed.action.needs(schedule.num_stages)
            ]
            assert timed.start_seconds == max([free, *arrivals])
            free = timed.end_seconds


@settings(max_examples=40, deadline=None)
@given(cases())
def test_totals(case):
    schedule, seconds = case
    timeline = simulate(schedule, seconds)
    work = sum(
        schedule.num_microbatches
        * (stage.forward_seconds + stage.backward_input_seconds + stage.backward_weights_seconds)
        for stage in seconds
    )
    assert sum(timeline.busy_seconds) == work
    assert timeline.total_seconds >= max(timeline.busy_seconds)
    assert 0 <= timeline.bubble_share < 1


def test_two_stages_by_hand():
    """Stage 1 takes twice as long, and a transfer takes half a second.

    device 0   F0 at 0.0, F1 at 1.0, B0 at 8.0, B1 at 14.0
    device 1   F0 at 1.5, B0 at 3.5, F1 at 7.5, B1 at 9.5
    """
    timeline = simulate(
        one_forward_one_backward(2, 2), [StageSeconds(1, 1, 1, transfer_seconds=0.5), StageSeconds(2, 2, 2)]
    )
    starts = [[timed.start_seconds for timed in actions] for actions in timeline.devices]
    assert starts == [[0, 1, 8, 14], [1.5, 3.5, 7.5, 9.5]]
    assert timeline.total_seconds == 16
    assert timeline.busy_seconds == (6, 12)
    assert timeline.bubble_share == 1 - 18 / 32
    assert timeline.peak_alive == (2, 1)


def test_stages_on_one_device_send_nothing():
    alone = build("interleaved", num_devices=1, num_stages=2, num_microbatches=1)
    assert simulate(alone, [StageSeconds(1, 1, 1, transfer_seconds=9)] * 2).total_seconds == 6


def test_a_wrong_schedule_stops_where_it_is_wrong():
    schedule = Schedule((tuple(reversed(gpipe(1, 2).devices[0])),))
    assert play(schedule, lambda stage: EQUAL_SECONDS).devices == ((),)
    with refused("schedule, device 0: B0 stands before F0"):
        simulate(schedule, [EQUAL_SECONDS])


def test_the_seconds_are_those_of_all_stages():
    with pytest.raises(AssertionError, match="seconds of 1 stages for 2 stages"):
        simulate(gpipe(2, 2), [EQUAL_SECONDS])
