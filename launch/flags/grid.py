"""The flag of the grid of devices: how many towers there are, and how many devices each of them has."""

from absl import flags

from launch.flags.checks import listed_in_help
from strategies.registry import check_groups, has_slices, has_stages, may_have_groups
from towers.errors import UserError
from towers.grid import SLICE, STAGE, Grid

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "grid",
    None,
    "Number of towers and of devices in each tower: data:2,stage:3 (--strategy=pipeline), data:2,slice:2 (slices) "
    "or data:2,branch:2 (branches). Towers divide each batch; the devices of a tower divide the model. Default: "
    "--num_towers (or one) towers of --stages, --slices or --branch_devices devices. --strategy=ring: the towers "
    "of each worker, with stage or slice; default: towers of one device.",
)
listed_in_help(__name__)


def divided_by() -> str | None:
    """What each device of a tower has, STAGE or SLICE; None if a tower is one device.

    Raises:
      UserError: --grid is malformed, its towers have one device each, or branches on a ring.
    """
    if has_stages(FLAGS.strategy):
        return STAGE
    if has_slices(FLAGS.strategy):
        return SLICE
    if FLAGS.grid is None or not may_have_groups(FLAGS.strategy):
        return None
    grid = Grid.parse(FLAGS.grid)
    if grid.num_devices == grid.data:
        raise UserError(
            f"--grid={FLAGS.grid} with --strategy={FLAGS.strategy}: its towers are single devices; give stage:2, "
            f"slice:2 or more, or --num_towers={grid.data} instead"
        )
    if grid.branch > 1:
        raise UserError(
            f"--grid={FLAGS.grid}: --strategy={FLAGS.strategy} has no branches; use stage:N or slice:N"
        )
    return STAGE if grid.stage > 1 else SLICE


def grid_from_flags(num_stage_devices: int) -> Grid | None:
    """The grid of this process's devices; None if each tower is one device.

    Args:
      num_stage_devices: devices of a tower if --grid does not say it.

    Raises:
      UserError: a grid that is none, that the strategy can't use, or that --num_towers contradicts.
    """
    if FLAGS.grid is None:
        return Grid(data=FLAGS.num_towers or 1, stage=num_stage_devices) if has_stages(FLAGS.strategy) else None
    check_groups(FLAGS.strategy, grouped=True)
    grid = Grid.parse(FLAGS.grid)
    if grid.slice > 1 or grid.branch > 1:
        other = "slices" if grid.slice > 1 else "branches"
        raise UserError(f"--grid={FLAGS.grid}: --strategy={FLAGS.strategy} has stages, no {other}; use stage:N")
    if FLAGS.num_towers not in (None, grid.data):
        raise UserError(
            f"--grid={FLAGS.grid} has {grid.data} towers, --num_towers={FLAGS.num_towers}: omit --num_towers"
        )
    return grid
