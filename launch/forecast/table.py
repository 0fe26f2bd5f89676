"""The modes as a table of text, a row for each, and what ZeRO and recomputation would save."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from launch.forecast.byte_text import byte_text, in_unit, unit_for
from launch.forecast.columns import ARITHMETIC, Column
from towers.memory.engine_memory import StepMemory
from towers.memory.zero import BytesPerParameter, model_states

_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "collectives")
_BETWEEN = "  "


def table(columns: Sequence[Column], measured: Mapping[str, float], width: int = 120) -> list[str]:
    """The lines of a table with a row for each mode: its fullest device at the peak.

    Figures that don't fit into `width` follow in further tables below.

    Args:
      columns: the modes.
      measured: measured peaks of the whole process, by the mode's name.
      width: characters in a line.
    """
    unit = unit_for(max(max(one.device.total_bytes, _process_bytes(one)) for one in columns))
    names = [unit, *(one.name + "*" * (one.basis == ARITHMETIC) for one in columns)]
    figures = [_aligned(figure) for figure in _figures(columns, measured, unit)]
    lines = []
    for block in _blocks(figures, width - max(map(len, names))):
        rows = zip(_aligned(names, to_left=True), *block, strict=True)
        lines += [*([""] if lines else []), *(_BETWEEN.join(row).rstrip() for row in rows)]
    if any(one.basis == ARITHMETIC for one in columns):
        lines.append(
            "*: computed by formulas from the figures of one process; all others from the graph that a mode runs"
        )
    return lines


def _figures(columns: Sequence[Column], measured: Mapping[str, float], unit: str) -> Iterator[list[str]]:
    """Each figure for all modes, its name first: sums, measured peaks, the parts of a device's memory."""
    yield ["device", *(in_unit(one.device.total_bytes, unit) for one in columns)]
    yield ["process", *(in_unit(_process_bytes(one), unit) if one.process else "" for one in columns)]
    if measured:
        peaks = [measured.get(one.name) if one.process else None for one in columns]
        yield ["measured", *("" if peak is None else in_unit(peak, unit) for peak in peaks)]
        errors = zip(columns, peaks, strict=True)
        yield [
            "predicted",
            *("" if peak is None else f"{_process_bytes(one) / peak - 1:+.1%}" for one, peak in errors),
        ]
    for part in _PARTS:
        yield [part, *(in_unit(getattr(one.device, f"{part}_bytes"), unit) for one in columns)]


def _blocks(figures: Sequence[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Groups of figures that fit into a line of `width` characters; at least one figure each."""
    block, used = [], 0
    for figure in figures:
        needed = len(_BETWEEN) + len(figure[0])
        if block and used + needed > width:
            yield block
            block, used = [], 0
        block.append(figure)
        used += needed
    yield block


def _aligned(cells: Sequence[str], *, to_left: bool = False) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) if to_left else cell.rjust(width) for cell in cells]


def _process_bytes(column: Column) -> float:
    return 0 if column.process is None else column.process.total_bytes


def saved_by_zero(num_parameters: int, each: BytesPerParameter, count: int) -> list[str]:
    """A line for each stage of ZeRO: the model states on a device, and how much of them the stage saves."""
    whole = model_states(num_parameters, count, zero=0, each=each).total_bytes
    found = []
    for zero in (1, 2, 3):
        left = model_states(num_parameters, count, zero=zero, each=each).total_bytes
        found.append(
            f"ZeRO-{zero} on {count} devices would save {byte_text(whole - left)} a device, of {byte_text(whole)} "
            "of parameters, gradients and optimizer state"
        )
    return found


def saved_by_recomputation(columns: Sequence[Column], whole: str) -> list[str]:
    """A line for each kind of recomputation: what it saves on the fullest device.

    Args:
      columns: the modes.
      whole: name of the mode that keeps its activations; the names of the others begin with it.
    """
    by_name = {one.name: one.device for one in columns}
    found = []
    for name, device in by_name.items():
        kind = name.removeprefix(f"{whole}, recompute=")
        if kind != name and whole in by_name:
            before = by_name[whole].total_bytes
            found.append(
                f"recompute={kind} would save {byte_text(max(0, before - device.total_bytes))} of "
                f"{byte_text(before)} on the fullest device"
            )
    return found


def as_json(columns: Sequence[Column], measured: Mapping[str, float]) -> list[dict]:
    """The table as JSON objects, one for each mode."""
    return [
        {
            "name": one.name,
            "is_arithmetic": one.basis == ARITHMETIC,
            "device": _fields(one.device),
            "process": one.process and _fields(one.process),
            "measured_bytes": measured.get(one.name),
        }
        for one in columns
    ]


def _fields(memory: StepMemory) -> dict[str, float]:
    return {**dataclasses.asdict(memory), "total_bytes": memory.total_bytes}
