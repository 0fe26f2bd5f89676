"""What a run prints about its pipeline, from actions with known times."""

import pytest

from towers.pipeline import builders
from towers.pipeline.simulator import simulate
from towers.pipeline.timeline import StageSeconds
from towers.timeline.activities import Activity, Work
from towers.timeline.intervals import Interval
from towers.timeline.layer_seconds import layer_seconds
from towers.timeline.operations import TracedOperation, Transfer
from towers.timeline.pipeline_run import (
    described,
    gpipe_bubble,
    pipeline_runs,
    predicted,
    schedule_name,
    stage_seconds,
)

# Seconds that are exact as binary fractions.
STAGES = [StageSeconds(0.25, 0.5, 0.125, 0.0625), StageSeconds(0.125, 0.25, 0.0625)]


def ran(name: str, num_microbatches: int = 4, stages=STAGES, steps: int = 2):
    """The pipeline runs of `steps` steps that took exactly the simulated times, and the simulation."""
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


def traced(layers, num_microbatches: int = 8):
    """The operations of a step on two devices with half of the layers each; `layers` gives seconds by pass."""
    found = []
    for index, (name, seconds) in enumerate(layers.items()):
        stage = 2 * index // len(layers)
        for microbatch in range(num_microbatches):
            for kind, scope, taken in zip("FB", ("", "gradient_tape/"), seconds, strict=True):
                operation = f"tower_0/action_{stage}{kind}{microbatch}/PartitionedCall/{scope}net_1/{name}/MatMul"
                begin = 100.0 * microbatch + (index if kind == "F" else 50.0 - index)
                found.append(TracedOperation(begin, begin + taken, operation, f"CPU:{stage}"))
    return found


def test_more_stages_are_predicted_from_the_same_layers():
    """GPipe with K equal stages takes (M + K - 1) times a microbatch's time in a stage."""
    equal = [StageSeconds(2.0, 4.0, 0.0)] * 2
    runs, played = ran("gpipe", 8, equal)
    operations = traced({f"dense_{index}": (0.5, 1.0) for index in range(8)})
    lines = described(runs, played.total_seconds + 1.0, operations)
    assert lines[-1].startswith("predicted time of a step, 8 layers divided by their times: ")
    assert (
        f"4 devices {1e3 * (11 * 3 + 1):.0f} ms" in lines[-1]
        and f"8 devices {1e3 * (15 * 1.5 + 1):.0f} ms" in lines[-1]
    )
    assert "bubble: measured 11.1%, simulated 11.1%, with equal stages 11.1%" in lines[-2]


def test_layers_are_cut_where_the_largest_stage_is_smallest():
    """Two devices ran layers of [3] and [1 1 1]: the first layer can't be divided, so four devices wait for it."""
    layers = {"wide": (3.0, 6.0), **{f"narrow_{index}": (1.0, 2.0) for index in range(3)}}
    stages = [StageSeconds(4.0, 8.0, 0.0), StageSeconds(2.0, 4.0, 0.0)]
    runs, played = ran("gpipe", 8, stages)
    found = layer_seconds(traced(layers), stages)
    assert [each.forward_seconds for each in found] == [3.0, 1.0, 1.0, 1.0]
    assert [each.backward_seconds for each in found] == [6.0, 2.0, 2.0, 2.0]
    other = predicted("gpipe", played.schedule, found, 4, 0.0)
    assert other.total_seconds == 8 * 9.0 + 3 * 1.0 + 3 * 2.0
    assert predicted("gpipe", played.schedule, found, 5, 0.0) is None
    assert "8 devices: more stages than layers" in described(runs, 0.0, traced(layers))[-1]


def test_what_belongs_to_no_layer_counts_with_the_last_one_of_its_stage():
    loss = TracedOperation(90.0, 93.0, "tower_0/action_1F0/StatefulPartitionedCall/Sum_2", "CPU:1")
    stages = [StageSeconds(1.0, 2.0, 0.0), StageSeconds(2.0, 2.0, 0.0)]
    shape = TracedOperation(0.0, 0.5, "tower_0/action_0F0/PartitionedCall/Reshape/shape/0", "CPU:0")
    layers = {name: (1.0, 2.0) for name in ("first", "last")}
    found = layer_seconds([shape, *traced(layers, 1), loss], stages)
    assert [each.forward_seconds for each in found] == [1.0, 2.0]


def test_interleaved_stages_stay_on_their_devices():
    runs, played = ran("interleaved", 4, [*STAGES, *STAGES])
    assert runs[0].timeline.schedule == played.schedule
    assert runs[0].devices == ("CPU:0", "CPU:1")
