"""The timeline of a schedule: when each action runs, given the seconds of each stage."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from towers.pipeline.action import Action, Kind
from towers.pipeline.alive import peak_alive
from towers.pipeline.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """How long one microbatch takes in a stage.

    Attributes:
      forward_seconds: the forward pass.
      backward_input_seconds: the gradients of the stage's inputs.
      backward_weights_seconds: the gradients of its parameters.
      transfer_seconds: sending the stage's output to the next stage, and that output's gradient back. Devices
        compute during transfers. Stages on the same device send nothing.
    """

    forward_seconds: float
    backward_input_seconds: float
    backward_weights_seconds: float
    transfer_seconds: float = 0.0

    @property
    def backward_seconds(self) -> float:
        """The whole backward pass."""
        return self.backward_input_seconds + self.backward_weights_seconds

    def of(self, kind: Kind, is_split: bool) -> float:
        """Seconds of one pass."""
        if kind is Kind.FORWARD:
            return self.forward_seconds
        if kind is Kind.WEIGHTS:
            return self.backward_weights_seconds
        return self.backward_input_seconds if is_split else self.backward_seconds


def sum_of(stages: Sequence[StageSeconds]) -> StageSeconds:
    """One stage with the seconds of several consecutive ones, without their transfers."""
    return StageSeconds(
        sum(stage.forward_seconds for stage in stages),
        sum(stage.backward_input_seconds for stage in stages),
        sum(stage.backward_weights_seconds for stage in stages),
    )


# The forward pass and each half of the backward pass take equally long.
EQUAL_SECONDS = StageSeconds(1.0, 1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class TimedAction:
    """An action and its time, in seconds since the step began."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The played schedule.

    Attributes:
      schedule: what was played.
      devices: [devices] the actions that each device took: all of its actions if the schedule has no fault.
    """

    schedule: Schedule
    devices: tuple[tuple[TimedAction, ...], ...]

    @functools.cached_property
    def total_seconds(self) -> float:
        """When the last action ends."""
        return max((timed.end_seconds for actions in self.devices for timed in actions), default=0.0)

    @functools.cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """[devices] how long each device computes."""
        return tuple(sum(timed.end_seconds - timed.start_seconds for timed in actions) for actions in self.devices)

    @property
    def bubble_share(self) -> float:
        """The fraction of the devices' time that they wait, from 0 to 1."""
        if not self.total_seconds:
            return 0.0
        return 1.0 - sum(self.busy_seconds) / (len(self.devices) * self.total_seconds)

    @property
    def peak_alive(self) -> tuple[int, ...]:
        """[devices] the largest number of microbatches that are alive at once."""
        return peak_alive(self.schedule)


def play(schedule: Schedule, seconds_of: Callable[[int], StageSeconds]) -> Timeline:
    """Starts every action as soon as its device is free and what it needs has arrived.

    A device stops at an action that never gets what it needs, so a faulty schedule has a shorter timeline.

    Args:
      schedule: with or without faults.
      seconds_of: the seconds of a stage, from its index.
    """
    ends: dict[Action, float] = {}
    devices: list[list[TimedAction]] = [[] for _ in schedule.devices]
    moved = True
    while moved:
        moved = False
        for device, actions in enumerate(schedule.devices):
            while len(devices[device]) < len(actions):
                action = actions[len(devices[device])]
                arrival = _arrival_seconds(action, device, schedule, ends, seconds_of)
                if arrival is None:
                    break
                free = devices[device][-1].end_seconds if devices[device] else 0.0
                start = max(arrival, free)
                end = start + seconds_of(action.stage).of(action.kind, schedule.is_split)
                devices[device].append(TimedAction(action, start, end))
                ends.setdefault(action, end)
                moved = True
    return Timeline(schedule, tuple(map(tuple, devices)))


def _arrival_seconds(action, device, schedule, ends, seconds_of) -> float | None:
    """The time at which all that `action` needs is on `device`; None if some of it is not computed yet."""
    arrival = 0.0
    for need in action.needs(schedule.num_stages):
        if need not in ends:
            return None
        is_sent = schedule.stage_devices[need.stage] != device
        boundary = min(need.stage, action.stage)
        arrival = max(arrival, ends[need] + (seconds_of(boundary).transfer_seconds if is_sent else 0.0))
    return arrival
