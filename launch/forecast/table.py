"""Columns as a Markdown table, and what ZeRO would save."""

import dataclasses
from collections.abc import Mapping, Sequence

from launch.forecast.byte_text import byte_text
from launch.forecast.columns import ARITHMETIC, Column
from launch.measuring.tables import table_row
from towers.memory.engine_memory import StepMemory
from towers.memory.zero import BytesPerParameter, model_states

_ROWS = {
    "parameters": "parameters_bytes",
    "gradients": "gradients_bytes",
    "optimizer state": "optimizer_bytes",
    "activations": "activations_bytes",
    "buffers": "buffers_bytes",
    "collectives": "collectives_bytes",
    "a device": "total_bytes",
}


def table(columns: Sequence[Column], measured: Mapping[str, float]) -> list[str]:
    """The lines of a Markdown table: a column for each mode, of its fullest device at its peak.

    Args:
      columns: the modes.
      measured: measured peaks of the whole process, by the column's name.
    """
    lines = [table_row(["bytes", *(one.name for one in columns)]), table_row(["---"] * (len(columns) + 1))]
    for name, field in _ROWS.items():
        lines.append(table_row([name, *(byte_text(getattr(one.device, field)) for one in columns)]))
    lines.append(table_row(["the process", *(_process(one) for one in columns)]))
    if measured:
        lines.append(table_row(["measured", *(_measured(one, measured) for one in columns)]))
    lines.append(table_row(["from", *(one.basis for one in columns)]))
    return lines


def saved_by_zero(num_parameters: int, each: BytesPerParameter, count: int) -> list[str]:
    """A line for each stage: the model states on a device, and what the stage saves of them."""
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


def _process(column: Column) -> str:
    return "" if column.process is None else byte_text(column.process.total_bytes)


def _measured(column: Column, measured: Mapping[str, float]) -> str:
    if column.name not in measured or column.process is None:
        return ""
    of_process = measured[column.name]
    return f"{byte_text(of_process)}, predicted {column.process.total_bytes / of_process - 1:+.1%}"
