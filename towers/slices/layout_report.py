"""The layout of a model for the user: a table of all parameters, and the large ones that nothing splits."""

from collections.abc import Sequence

from towers.slices.layout import NO_RULE, LayerSplit, Layout
from towers.slices.splits import WHOLE

_COLUMNS = (
    "parameter",
    "shape",
    "split",
    "of each device",
    "bytes of each device",
    "collective, or why it is whole",
)
# A parameter with more than this fraction of all bytes is large.
_LARGE = 1 / 20


def layout_table(layout: Layout, devices: Sequence[str]) -> str:
    """A table with a line for each parameter, and a line with the bytes of each device.

    Args:
      layout: the splits.
      devices: the device of each slice.
    """
    names = [device.rpartition("device:")[2] for device in devices]
    rows, totals = [], [0] * len(devices)
    for index, name in enumerate(layout.names):
        held = layout.bytes_of(index)
        totals = [total + own for total, own in zip(totals, held, strict=True)]
        rows.append(_row(layout, index, name, held))
    rows.append(("in all", "", "", " ".join(names), _numbers(totals), ""))
    widths = [max(len(row[column]) for row in [_COLUMNS, *rows]) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [_COLUMNS, *rows]
    )


def large_whole_notices(layout: Layout) -> list[str]:
    """A line for each large parameter that nothing splits, with its bytes and the reason."""
    held = [layout.bytes_of(index) for index in range(len(layout.names))]
    limit = sum(map(sum, held)) * _LARGE
    return [
        f"not sliced: {name}, {sum(own):,} bytes on the first device ({_reason(layout, index)})"
        for index, (name, own) in enumerate(zip(layout.names, held, strict=True))
        if index not in layout.cuts and sum(own) > limit
    ]


def _row(layout: Layout, index: int, name: str, held: Sequence[int]) -> tuple[str, ...]:
    split = layout.split_of(index)
    shape = " x ".join(map(str, layout.shape(index)))
    if index not in layout.cuts:
        return name, shape, WHOLE, "all on the first", _numbers(held), _reason(layout, index)
    dimension, lengths = layout.cuts[index]
    collective = _collective(layout, split) if layout.is_first_cut(index) else ""
    return name, shape, split.split, f"{_numbers(lengths)} of dimension {dimension}", _numbers(held), collective


def _collective(layout: Layout, split: LayerSplit) -> str:
    reader = layout.reader_of_parts(split)
    return f"none: {reader.path} reads the parts" if reader else split.cut.collective


def _reason(layout: Layout, index: int) -> str:
    """Why a parameter is whole."""
    split = layout.split_of(index)
    if split is None:
        return NO_RULE
    return split.reason or f"{split.split} leave it whole"


def _numbers(values: Sequence[int]) -> str:
    return " ".join(f"{value:,}" for value in values)
