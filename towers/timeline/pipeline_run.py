"""Compares a pipeline's measured run with its schedule: bubble, time of each stage, prediction for more stages."""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence

from towers.errors import UserError
from towers.pipeline import builders
from towers.pipeline.action import Kind
from towers.pipeline.cut import balanced_boundaries
from towers.pipeline.faults import find_faults
from towers.pipeline.schedule import Schedule
from towers.pipeline.simulator import simulate
from towers.pipeline.timeline import EQUAL_SECONDS, StageSeconds, TimedAction, Timeline, sum_of
from towers.timeline.activities import activity_of
from towers.timeline.intervals import Interval
from towers.timeline.layer_seconds import layer_seconds
from towers.timeline.operations import TracedOperation, Transfer


@dataclasses.dataclass(frozen=True)
class PipelineRun:
    """A tower's pass through a pipeline in one step.

    Attributes:
      step, tower: number of the step and index of the tower.
      devices: [devices] names of the devices, in the order of the schedule.
      start_seconds: start of the first action, in the trace's clock.
      timeline: the actions with their measured times, counted from `start_seconds`.
    """

    step: int
    tower: int
    devices: tuple[str, ...]
    start_seconds: float
    timeline: Timeline


def pipeline_runs(intervals: Iterable[Interval]) -> list[PipelineRun]:
    """The pipelines of each step; none if the towers are single devices, or if a trace lacks an action."""
    actions: dict[tuple[int, int], list[Interval]] = collections.defaultdict(list)
    for one in intervals:
        if one.activity.action is not None and one.activity.tower is not None:
            actions[one.step, one.activity.tower].append(one)
    found = [_run(step, tower, of_one) for (step, tower), of_one in sorted(actions.items())]
    return [run for run in found if not find_faults(run.timeline.schedule)]


def _run(step: int, tower: int, intervals: Sequence[Interval]) -> PipelineRun:
    begin = min(one.start_seconds for one in intervals)
    by_device: dict[str, list[Interval]] = collections.defaultdict(list)
    # Device i of a schedule is the device of stage i.
    for one in sorted(intervals, key=lambda one: one.activity.action.stage):
        by_device[one.row].append(one)
    devices = []
    for of_device in by_device.values():
        of_device.sort(key=lambda one: (one.start_seconds, one.end_seconds))
        devices.append(
            tuple(
                TimedAction(one.activity.action, one.start_seconds - begin, one.end_seconds - begin)
                for one in of_device
            )
        )
    schedule = Schedule(tuple(tuple(timed.action for timed in of_device) for of_device in devices))
    return PipelineRun(step, tower, tuple(by_device), begin, Timeline(schedule, tuple(devices)))


def stage_seconds(runs: Sequence[PipelineRun], transfers: Sequence[Transfer] = ()) -> list[StageSeconds]:
    """[stages] measured seconds: medians over microbatches, steps and towers.

    If the schedule is not split, `backward_input_seconds` contains the whole backward pass.

    Args:
      runs: at least one, all of the same schedule.
      transfers: transfers of these steps.
    """
    taken: dict[tuple[int, Kind], list[float]] = collections.defaultdict(list)
    for run in runs:
        for timed in (timed for of_device in run.timeline.devices for timed in of_device):
            taken[timed.action.stage, timed.action.kind].append(timed.end_seconds - timed.start_seconds)
    sent: dict[int, list[float]] = collections.defaultdict(list)
    for one in transfers:
        action = activity_of(one.name).action
        if action is not None:
            sent[action.stage].append(one.end_seconds - one.start_seconds)
    return [
        StageSeconds(
            *(statistics.median(taken.get((stage, kind)) or [0.0]) for kind in Kind),
            transfer_seconds=statistics.median(sent.get(stage) or [0.0]),
        )
        for stage in range(runs[0].timeline.schedule.num_stages)
    ]


def schedule_name(schedule: Schedule) -> str | None:
    """The name of the schedule in `towers.pipeline.builders`; None for a custom schedule."""
    for name in builders.NAMES:
        try:
            built = builders.build(
                name,
                num_devices=len(schedule.devices),
                num_stages=schedule.num_stages,
                num_microbatches=schedule.num_microbatches,
            )
        except UserError:
            continue
        if built == schedule:
            return name
    return None


def predicted(
    name: str, schedule: Schedule, layers: Sequence[StageSeconds], num_devices: int, transfer_seconds: float
) -> Timeline | None:
    """The predicted timeline of all microbatches on another number of devices; None if there are too few layers.

    The layers are cut so that the largest stage is minimal, as with balance='time'.

    Args:
      name: name of a schedule.
      schedule: the schedule that ran: gives the number of microbatches, and of stages per device.
      layers: [layers] seconds of each layer, as from `towers.timeline.layer_seconds`.
      num_devices: number of devices of the other pipeline.
      transfer_seconds: seconds of a transfer at each boundary between stages.
    """
    num_stages = num_devices * (schedule.num_stages // len(schedule.devices))
    if num_stages > len(layers):
        return None
    costs = [layer.forward_seconds + layer.backward_seconds for layer in layers]
    stages = [
        dataclasses.replace(sum_of(layers[begin:end]), transfer_seconds=transfer_seconds)
        for begin, end in itertools.pairwise(balanced_boundaries(costs, num_stages))
    ]
    other = builders.build(
        name, num_devices=num_devices, num_stages=num_stages, num_microbatches=schedule.num_microbatches
    )
    return simulate(other, stages)


def described(
    runs: Sequence[PipelineRun],
    step_seconds: float,
    operations: Sequence[TracedOperation] = (),
    transfers: Sequence[Transfer] = (),
    more: Sequence[int] = (4, 8),
) -> list[str]:
    """Lines about a pipeline: its stages, its bubble beside the schedule's, and a prediction for more stages.

    Args:
      runs: runs of several steps; at least one.
      step_seconds: median time of a step.
      operations, transfers: operations and transfers of these steps.
      more: numbers of devices to predict.
    """
    schedule = runs[0].timeline.schedule
    stages = stage_seconds(runs, transfers)
    name = schedule_name(schedule)
    simulated = simulate(schedule, stages)
    measured = statistics.median(run.timeline.total_seconds for run in runs)
    bubble = statistics.median(run.timeline.bubble_share for run in runs)
    lines = [_stage_line(stage, one, runs[0]) for stage, one in enumerate(stages)]
    lines += [
        f"a step takes {_ms(step_seconds)}, its pipeline {_ms(measured)}; simulated with the times of the stages "
        f"{_ms(simulated.total_seconds)}",
        f"bubble: measured {bubble:.1%}, simulated {simulated.bubble_share:.1%}, with equal stages "
        f"{equal_bubble(schedule):.1%}; GPipe's (K-1)/(M+K-1) is {gpipe_bubble(schedule):.1%}",
    ]
    others = [count for count in more if count > len(schedule.devices)]
    if name is not None and others:
        layers = layer_seconds(operations, stages)
        transfer = max(stage.transfer_seconds for stage in stages)
        played = {count: predicted(name, schedule, layers, count, transfer) for count in others}
        rest = max(0.0, step_seconds - measured)
        predictions = ", ".join(_predicted(count, found, rest) for count, found in played.items())
        lines.append(f"predicted time of a step, {len(layers)} layers divided by their times: {predictions}")
    return lines


def _predicted(num_devices: int, found: Timeline | None, rest_seconds: float) -> str:
    if found is None:
        return f"{num_devices} devices: more stages than layers"
    return f"{num_devices} devices {_ms(rest_seconds + found.total_seconds)} (bubble {found.bubble_share:.1%})"


def equal_bubble(schedule: Schedule) -> float:
    """The bubble if each forward pass and each half of a backward pass takes equally long in all stages."""
    return simulate(schedule, [EQUAL_SECONDS] * schedule.num_stages).bubble_share


def gpipe_bubble(schedule: Schedule) -> float:
    """(K - 1) / (M + K - 1) for K devices and M microbatches (Huang et al. 2019, arXiv 1811.06965, sec. 2.3)."""
    return (len(schedule.devices) - 1) / (schedule.num_microbatches + len(schedule.devices) - 1)


def _stage_line(stage: int, seconds: StageSeconds, run: PipelineRun) -> str:
    device = run.devices[run.timeline.schedule.stage_devices[stage]]
    weights = seconds.backward_weights_seconds
    late = f", weight gradients {_ms(weights)}" if weights else ""
    return (
        f"stage {stage} on {device}: for each microbatch forward {_ms(seconds.forward_seconds)}, "
        f"backward {_ms(seconds.backward_input_seconds)}{late}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1.0 else f"{1e3 * seconds:.0f} ms"
