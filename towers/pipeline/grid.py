"""A schedule drawn over time, with marks on what is wrong.

    slot       0  1  2  3  4  5
    device 0  F0  .  .  . B0 ==
    device 1   . F0 B0 ==  .  .
    50.0% of the slots are bubble; most microbatches alive on each device: 1, 1

A forward pass and each half of a backward pass take a slot, so a B that is not split takes two ('=='). The device
waits in a slot with '.'. '!' marks a wrong action, '?' one that is never reached.
"""

from towers.pipeline.action import Action
from towers.pipeline.faults import Fault, find_faults
from towers.pipeline.schedule import Schedule
from towers.pipeline.timeline import EQUAL_SECONDS, TimedAction, Timeline, play

_IDLE, _GOES_ON = ".", "=="


def draw(schedule: Schedule, max_alive: int | None = None) -> str:
    """The grid, and below it the faults; without faults, the bubble and the microbatches alive.

    Args:
      schedule: what to draw, with or without faults.
      max_alive: the largest number of microbatches that a device may hold; None for any.
    """
    return "\n".join(_lines(schedule, max_alive))


def drawn_within(schedule: Schedule, width: int) -> list[str]:
    """The lines of `draw`; without the grid if its lines have more than `width` characters."""
    lines = _lines(schedule, None)
    rows = 1 + len(schedule.devices)
    return lines if max(map(len, lines[:rows])) <= width else lines[rows:]


def _lines(schedule: Schedule, max_alive: int | None) -> list[str]:
    found = find_faults(schedule, max_alive)
    wrong = {(fault.device, fault.position) for fault in found}
    timeline = play(schedule, lambda stage: EQUAL_SECONDS)
    rows = [_row(timeline, device, wrong) for device in range(len(schedule.devices))]
    below = [f"! {_where(fault)}{fault.message}" for fault in found] or [_summary(timeline)]
    return [*_aligned(rows), *below]


def _row(timeline: Timeline, device: int, wrong: set) -> list[str]:
    """A cell for each slot of a device, then its actions that are never reached."""
    schedule = timeline.schedule
    cells = [_IDLE] * round(timeline.total_seconds)
    played = timeline.devices[device]
    for position, timed in enumerate(played):
        first, *others = _slots(timed)
        cells[first] = schedule.label(timed.action) + ("!" if (device, position) in wrong else "")
        for slot in others:
            cells[slot] = _GOES_ON
    never: list[tuple[int, Action]] = list(enumerate(schedule.devices[device]))[len(played) :]
    return cells + [
        schedule.label(action) + ("!" if (device, position) in wrong else "?") for position, action in never
    ]


def _slots(timed: TimedAction) -> range:
    return range(round(timed.start_seconds), round(timed.end_seconds))


def _aligned(rows: list[list[str]]) -> list[str]:
    num_columns = max(map(len, rows))
    header = [str(slot) for slot in range(num_columns)]
    width = 1 + max(len(cell) for row in [header, *rows] for cell in row)
    names = ["slot", *(f"device {device}" for device in range(len(rows)))]
    name_width = max(map(len, names)) + 1
    return [
        name.ljust(name_width) + "".join(cell.rjust(width) for cell in row)
        for name, row in zip(names, [header, *rows], strict=True)
    ]


def _where(fault: Fault) -> str:
    return "" if fault.device is None else f"device {fault.device}: "


def _summary(timeline: Timeline) -> str:
    alive = ", ".join(map(str, timeline.peak_alive))
    return f"{timeline.bubble_share:.1%} of the slots are bubble; most microbatches alive on each device: {alive}"
