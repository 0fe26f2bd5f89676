"""Simulates a pipeline's step: the timeline of a schedule for measured or assumed seconds."""

from collections.abc import Sequence

from towers.pipeline import faults
from towers.pipeline.schedule import Schedule
from towers.pipeline.timeline import StageSeconds, Timeline, play


def simulate(schedule: Schedule, stages: Sequence[StageSeconds]) -> Timeline:
    """The times of all actions, the total, the share of waiting, and how many microbatches are alive.

    Args:
      schedule: what each device does.
      stages: [stages] the seconds of a microbatch in each stage.

    Raises:
      UserError: the schedule has a fault.
    """
    assert len(stages) == schedule.num_stages, f"seconds of {len(stages)} stages for {schedule.num_stages} stages"
    faults.check(schedule)
    return play(schedule, stages.__getitem__)
