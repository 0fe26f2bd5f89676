"""Schedules as CSV: a line for each device, a cell for each action, in the order in which the device takes them.

    F0,F1,B0,B1          device 0, which is stage 0
    F0,B0,F1,B1          device 1, which is stage 1

A cell is F, B or W and the index of a microbatch, counted from 0. Where devices have several stages, every cell
begins with the index of its stage: 1F3 is the forward pass of microbatch 3 through stage 1. If there is any W, B
computes only the gradients of inputs, and every B needs a W. Empty cells, empty lines and lines that begin with #
are skipped.
"""

import dataclasses
import re

from towers.errors import UserError
from towers.pipeline.action import Action, Kind
from towers.pipeline.faults import Fault, and_others, find_faults
from towers.pipeline.schedule import Schedule

_CELL = re.compile(r"([0-9]{1,6})?([FBW])([0-9]{1,6})")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the text: its position, counted from 1 as in editors, and its text."""

    line: int
    number: int
    text: str


@dataclasses.dataclass(frozen=True)
class WrittenSchedule:
    """A schedule as read from a file, perhaps with faults: `grid.draw(written.schedule)` shows them all.

    Attributes:
      source: name of the file, for messages.
      schedule: what the cells say.
      cells: [devices][actions] the cell of each action.
    """

    source: str
    schedule: Schedule
    cells: tuple[tuple[Cell, ...], ...]

    def check(self, max_alive: int | None = None) -> None:
        """Checks that the schedule can be run.

        Raises:
          UserError: it has a fault. The message names file, line and cell.
        """
        found = find_faults(self.schedule, max_alive)
        if found:
            raise UserError(f"{self._place_of(found[0])}: {found[0].message}{and_others(found)}")

    def _place_of(self, fault: Fault) -> str:
        if fault.device is None:
            return self.source
        cells = self.cells[fault.device]
        number = None if fault.position is None else cells[fault.position].number
        return _place(self.source, cells[0].line, number)


def write(schedule: Schedule) -> str:
    """The schedule as CSV."""
    return "".join(",".join(map(schedule.label, actions)) + "\n" for actions in schedule.devices)


def read(text: str, source: str, max_alive: int | None = None) -> Schedule:
    """Reads and checks the schedule in a CSV file.

    Args:
      text: the file's content.
      source: the file's name, for messages.
      max_alive: the largest number of microbatches that a device may hold; None for any.

    Raises:
      UserError: a cell is not an action, or the schedule cannot be run.
    """
    written = parse(text, source)
    written.check(max_alive)
    return written.schedule


def parse(text: str, source: str) -> WrittenSchedule:
    """Reads the schedule in a CSV file without checking it.

    Raises:
      UserError: a cell is not an action, or only some cells name their stage.
    """
    lines = [cells for cells in _lines_of_cells(text) if cells]
    if not lines:
        raise UserError(f"{source}: no actions: write one line a device, such as F0,F1,B0,B1")
    matches = [[_matched(cell, source) for cell in cells] for cells in lines]
    _check_stages_named(lines, matches, source)
    devices = tuple(
        tuple(_action(match, device) for match in line_matches) for device, line_matches in enumerate(matches)
    )
    return WrittenSchedule(source, Schedule(devices), tuple(map(tuple, lines)))


def _lines_of_cells(text: str) -> list[list[Cell]]:
    """The cells of each line that are not empty. Spreadsheets may write quotes and a byte order mark."""
    lines = [line.strip() for line in text.removeprefix("\ufeff").splitlines()]
    return [
        [
            Cell(number, index, cell.strip().strip('"'))
            for index, cell in enumerate(line.split(","), start=1)
            if cell.strip().strip('"')
        ]
        for number, line in enumerate(lines, start=1)
        if not line.startswith("#")
    ]


def _matched(cell: Cell, source: str) -> re.Match:
    match = _CELL.fullmatch(cell.text)
    if not match:
        raise UserError(
            f"{_place(source, cell.line, cell.number)}: {cell.text[:40]!r} is no action: a cell is F (forward), "
            "B (backward) or W (gradients of weights) and the index of a microbatch, such as F3; "
            "1F3 names stage 1 too; separate cells by commas"
        )
    return match


def _check_stages_named(lines: list[list[Cell]], matches: list[list[re.Match]], source: str) -> None:
    named = [match[1] is not None for line_matches in matches for match in line_matches]
    if any(named) and not all(named):
        cell = [cell for cells in lines for cell in cells][named.index(False)]
        raise UserError(
            f"{_place(source, cell.line, cell.number)}: {cell.text} names no stage, but other cells do: "
            f"either every cell names its stage or none does; write such as 1{cell.text} for stage 1"
        )


def _action(match: re.Match, device: int) -> Action:
    stage, kind, microbatch = match.groups()
    return Action(Kind(kind), device if stage is None else int(stage), int(microbatch))


def _place(source: str, line: int, cell: int | None) -> str:
    return f"{source}, line {line}" + ("" if cell is None else f", cell {cell}")
