"""Flags of pipelines (--strategy=pipeline, or a grid with stages on a ring): stages, microbatches, schedule."""

import functools
import pathlib
import sys

from absl import flags

from launch.flags.checks import listed_in_help, positive
from launch.flags.grid import divided_by
from launch.flags.paths import define_path
from strategies.registry import ON_REQUEST, divides
from towers.errors import UserError
from towers.grid import BRANCH, STAGE, Grid
from towers.pipeline import builders, grid, schedule_csv
from towers.pipeline.faults import find_faults
from towers.pipeline.schedule import Schedule
from towers.stages.options import PipelineOptions

FLAGS = flags.FLAGS
_DEFAULT_STAGES = 2
# A drawing of a schedule with wider rows is left out.
_WIDEST_GRID = 160

flags.DEFINE_integer(
    "stages",
    None,
    "For pipelines: number of stages that the model is cut into, each on a device of its own (with "
    f"--pipeline_schedule=interleaved several on each device of --grid). Default: the devices of a tower, "
    f"{_DEFAULT_STAGES}.",
)
flags.DEFINE_integer(
    "microbatches",
    None,
    "For pipelines: number of microbatches that each batch is split into. More microbatches make the bubble "
    "smaller, but each operation works on fewer examples. Default: twice the stages.",
)
define_path(
    "pipeline_schedule",
    "1f1b",
    f"For pipelines: the order of the passes: {', '.join(builders.NAMES)}, or a CSV file with a line for each "
    "device, such as F0,F1,B0,B1. 1f1b keeps the fewest microbatches in memory; interleaved and zb_h1 have a "
    "smaller bubble.",
    words=builders.NAMES,
)
flags.DEFINE_string(
    "balance",
    "parameters",
    "For pipelines and branches: what is balanced over a tower's devices. parameters: the number of "
    "parameters. time: the time of each operation, measured at the start. 5,3 (pipelines only): the number of "
    "operations in each stage.",
)
positive("stages", "microbatches")
listed_in_help(__name__)


def pipeline_from_flags() -> PipelineOptions | None:
    """The options of a pipeline; None if towers have no stages.

    Raises:
      UserError: the file is not a schedule, a value is not allowed, or a flag of pipelines is given without one.
    """
    axis = divided_by()
    if axis != STAGE:
        _refuse("no stages", "pipeline", "stages", "microbatches", "pipeline_schedule")
        if axis != BRANCH:
            _refuse("neither stages nor branches", "pipeline or branches", "balance")
        return None
    _check_stages()
    return PipelineOptions(
        stages=FLAGS.stages, microbatches=FLAGS.microbatches, schedule=_schedule(), balance=_balance(FLAGS.balance)
    )


def _refuse(lacks: str, able: str, *names: str) -> None:
    """Raises UserError if one of these flags is given.

    Args:
      lacks: what towers of this strategy don't have, as 'no stages'.
      able: the strategies whose towers have it.
      names: names of the flags.
    """
    on_request = divides(FLAGS.strategy) == ON_REQUEST
    use = f"add --grid=stage:{FLAGS.stages or _DEFAULT_STAGES}" if on_request else f"use --strategy={able}"
    for name in names:
        if FLAGS[name].value != FLAGS[name].default:
            raise UserError(
                f"--{name}={FLAGS[name].value} with --strategy={FLAGS.strategy}: its towers have {lacks}; "
                f"{use}, or omit --{name}"
            )


def num_stage_devices() -> int:
    """Number of devices of a tower if --grid is not given."""
    schedule = _schedule() if divides(FLAGS.strategy) == STAGE else ""
    return len(schedule.devices) if isinstance(schedule, Schedule) else FLAGS.stages or _DEFAULT_STAGES


def _check_stages() -> None:
    """Raises UserError if the stages can't be spread evenly over the devices that --grid gives to a tower."""
    devices = 1 if FLAGS.grid is None else Grid.parse(FLAGS.grid).stage
    if FLAGS.stages is not None and FLAGS.stages % devices:
        raise UserError(
            f"--stages={FLAGS.stages} with --grid={FLAGS.grid}: a tower of this grid has {devices} devices, with "
            f"as many stages on each; omit --stages for {devices} stages, or give another grid"
        )


def _schedule() -> str | Schedule:
    return _schedule_of(FLAGS.pipeline_schedule)


@functools.cache
def _schedule_of(given: str) -> str | Schedule:
    if given in builders.NAMES:
        return given
    path = pathlib.Path(given)
    try:
        if not path.is_file():
            raise UserError(
                f"--pipeline_schedule={given}: no such schedule and no such file; use "
                f"{', '.join(builders.NAMES)}, or the path of a CSV file"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--pipeline_schedule={given}: the file can't be read as text: {error}") from None
    written = schedule_csv.parse(text, given)
    _show_faults(written.schedule)
    written.check()
    return written.schedule


def _show_faults(schedule: Schedule) -> None:
    """Draws a schedule that can't be run, with its faults marked, to stderr; of a long one only the faults."""
    if find_faults(schedule):
        print("\n".join(grid.drawn_within(schedule, _WIDEST_GRID)), file=sys.stderr)


def _balance(given: str) -> str | tuple[int, ...]:
    words = given.split(",")
    return tuple(map(int, words)) if all(word.strip().isdecimal() for word in words) else given
