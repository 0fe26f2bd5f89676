"""Draws intervals as a picture: a panel for each step, in it a row for each device."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from strategies.reports.chrome_trace import between_actions
from towers.pipeline.action import Action
from towers.timeline.activities import Activity, Work
from towers.timeline.intervals import Interval
from towers.timeline.operations import Span, Transfer
from towers.timeline.pipeline_run import PipelineRun, equal_bubble

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, DPI = 14.0, 120
_ROW_HEIGHT, _PANEL_HEIGHT, _LEGEND_HEIGHT = 0.42, 0.75, 0.45
_BAR = 0.76
_COLOURS = {
    Work.FORWARD: "#2a6fb5",
    Work.BACKWARD: "#d9772b",
    Work.WEIGHTS: "#8a5ab0",
    Work.RECOMPUTED: "#3f9e8f",
    Work.EXCHANGE: "#c23b52",
    Work.UPDATE: "#4d8f3c",
    Work.INPUT: "#c9a227",
    Work.OTHER: "#8a8a8a",
}
_BUBBLE, _ARROW = "#ececec", "#333333"
# How much lighter than the first the last microbatch is drawn.
_LIGHTENED = 0.5
# Width of a letter of a label, in inches.
_LETTER = 0.075


def picture(
    steps: Mapping[int, Span],
    rows: Sequence[str],
    intervals: Sequence[Interval],
    transfers: Sequence[Transfer],
    runs: Sequence[PipelineRun],
) -> bytes:
    """A PNG, WIDTH inches wide, with DPI dots per inch.

    Args:
      steps: the time span of each step; one panel for each.
      rows: names of the rows, from above.
      intervals: what the rows did.
      transfers: transfers between actions of pipelines become thin lines from row to row.
      runs: the pipelines in these steps.
    """
    # Importing matplotlib takes a second.
    from matplotlib.figure import Figure

    panel_height = _PANEL_HEIGHT + _ROW_HEIGHT * len(rows)
    figure = Figure(figsize=(WIDTH, _LEGEND_HEIGHT + panel_height * len(steps)), layout="constrained")
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(span.end_seconds - span.start_seconds for span in steps.values())
    for axes, (step, span) in zip(panels, sorted(steps.items()), strict=True):
        of_step = [one for one in runs if one.step == step]
        _draw_frame(axes, rows, longest, _title(step, span, of_step))
        _draw_bubbles(axes, span, rows, of_step)
        _draw_intervals(axes, span, rows, [one for one in intervals if one.step == step], longest)
        within = [one for one in transfers if span.start_seconds <= one.start_seconds < span.end_seconds]
        _draw_transfers(axes, span, rows, within)
    panels[-1].set_xlabel("milliseconds since the step began")
    _draw_legend(figure, [one.activity.work for one in intervals], has_bubble=bool(runs))
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI, format="png")
    return drawn.getvalue()


def _title(step: int, span: Span, runs: Sequence[PipelineRun]) -> str:
    text = f"step {step}: {1e3 * (span.end_seconds - span.start_seconds):.1f} ms"
    if runs:
        measured = sum(run.timeline.bubble_share for run in runs) / len(runs)
        equal = equal_bubble(runs[0].timeline.schedule)
        text += f"   bubble {measured:.1%} (schedule with equal stages: {equal:.1%})"
    return text


def _draw_frame(axes: "Axes", rows: Sequence[str], longest: float, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * longest)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_bubbles(axes: "Axes", span: Span, rows: Sequence[str], runs: Sequence[PipelineRun]) -> None:
    """The whole time of each pipeline in grey; what its devices compute is drawn over it."""
    for run in runs:
        begin = 1e3 * (run.start_seconds - span.start_seconds)
        for device in run.devices:
            axes.barh(rows.index(device), 1e3 * run.timeline.total_seconds, left=begin, height=_BAR, color=_BUBBLE)


def _draw_intervals(
    axes: "Axes", span: Span, rows: Sequence[str], intervals: Sequence[Interval], longest: float
) -> None:
    num_microbatches = 1 + max(
        (one.activity.action.microbatch for one in intervals if one.activity.action), default=0
    )
    axes.barh(
        [rows.index(one.row) for one in intervals],
        [1e3 * one.seconds for one in intervals],
        left=[1e3 * (one.start_seconds - span.start_seconds) for one in intervals],
        height=_BAR,
        color=[_colour(one.activity, num_microbatches) for one in intervals],
        edgecolor=["white" if one.activity.action else "none" for one in intervals],
        linewidth=0.6,
    )
    stages = {action.stage for action in map(_action, intervals) if action}
    per_device = {(one.row, one.activity.action.stage) for one in intervals if one.activity.action}
    has_one_stage_a_device = len({row for row, _ in per_device}) >= len(stages)
    for one in intervals:
        action = _action(one)
        if action is None:
            continue
        text = action.short if has_one_stage_a_device else str(action)
        if one.seconds / longest * WIDTH * 0.92 > _LETTER * len(text):
            middle = 0.5 * (one.start_seconds + one.end_seconds) - span.start_seconds
            axes.text(1e3 * middle, rows.index(one.row), text, ha="center", va="center", color="white", fontsize=8)


def _action(interval: Interval) -> Action | None:
    return interval.activity.action


def _colour(activity: Activity, num_microbatches: int) -> tuple[float, ...]:
    """The colour of the work; lighter for later microbatches."""
    from matplotlib.colors import to_rgb

    share = activity.action.microbatch / num_microbatches if activity.action else 0.0
    return tuple(part + (1.0 - part) * _LIGHTENED * share for part in to_rgb(_COLOURS[activity.work]))


def _draw_transfers(axes: "Axes", span: Span, rows: Sequence[str], transfers: Sequence[Transfer]) -> None:
    for one in between_actions(transfers):
        if one.source in rows and one.target in rows:
            source, target = rows.index(one.source), rows.index(one.target)
            edge = 0.5 * _BAR if target > source else -0.5 * _BAR
            times = [1e3 * (seconds - span.start_seconds) for seconds in (one.start_seconds, one.end_seconds)]
            axes.plot(times, [source + edge, target - edge], color=_ARROW, linewidth=0.9)


def _draw_legend(figure, present: Sequence[Work], *, has_bubble: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=work.value) for work, colour in _COLOURS.items() if work in present]
    if has_bubble:
        handles += [Patch(color=_BUBBLE, label="bubble"), Line2D([], [], color=_ARROW, label="transfer")]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
