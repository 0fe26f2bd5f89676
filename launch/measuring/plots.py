"""Draws the results as plots."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from launch.measuring.results import PARTS, RATE
from launch.measuring.tables import rate_text, with_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _PEERS = "#1f5fa8", "#9a9a9a"
_PART_COLOURS = {"input": "#e0a030", "compute": _OURS, "communication": "#b03a48"}
_WIDTH, _ROW_HEIGHT, _MARGIN = 8.0, 0.36, 1.2


def save_plots(found: Mapping, directory: pathlib.Path) -> list[pathlib.Path]:
    """Draws throughput.png, efficiency.png and time.png; omits a plot without data."""
    # Importing matplotlib takes a second, which the measured processes must not spend.
    from matplotlib.figure import Figure

    cases = with_rate(found)
    pictures = {
        "throughput.png": (_draw_throughput, cases),
        "efficiency.png": (_draw_efficiency, [one for one in cases if one["efficiency"] is not None]),
        "time.png": (_draw_time, [one for one in cases if one["time"] is not None]),
    }
    saved = []
    for name, (draw, shown) in pictures.items():
        if shown:
            figure = Figure(figsize=(_WIDTH, _MARGIN + _ROW_HEIGHT * len(shown)), layout="constrained")
            draw(figure.subplots(), shown)
            figure.savefig(directory / name, dpi=120)
            saved.append(directory / name)
    return saved


def _bars(
    axes: "Axes", cases: Sequence[Mapping], lengths: Sequence[float], text: Callable[[float], str], spread=None
) -> None:
    colours = [_PEERS if one["is_peer"] else _OURS for one in cases]
    bars = axes.barh([one["name"] for one in cases], lengths, color=colours, xerr=spread, capsize=3)
    axes.bar_label(bars, [text(length) for length in lengths], padding=4)
    axes.margins(x=0.15)
    # The table's first row is at the top.
    axes.invert_yaxis()


def _draw_throughput(axes: "Axes", cases: Sequence[Mapping]) -> None:
    rates = [one["figures"][RATE] for one in cases]
    medians = [rate["median"] for rate in rates]
    below = [rate["median"] - rate["min"] for rate in rates]
    above = [rate["max"] - rate["median"] for rate in rates]
    _bars(axes, cases, medians, rate_text, spread=[below, above])
    axes.set_xlabel("images per second: median, smallest and largest of the rounds (grey: peers)")


def _draw_efficiency(axes: "Axes", cases: Sequence[Mapping]) -> None:
    _bars(axes, cases, [one["efficiency"] for one in cases], "{:.2f}".format)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel("rate / rate of one tower with all threads (dashed: ideal on the same cores)")


def _draw_time(axes: "Axes", cases: Sequence[Mapping]) -> None:
    names, before = [one["name"] for one in cases], [0.0] * len(cases)
    for part in PARTS:
        shares = [one["time"][part] for one in cases]
        axes.barh(names, shares, left=before, color=_PART_COLOURS[part], label=part)
        before = [begin + share for begin, share in zip(before, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of a step's time")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PARTS), frameon=False)
