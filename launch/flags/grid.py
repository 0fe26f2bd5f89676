"""The flag of the grid of devices: how many towers there are, and how many devices each of them has."""

from absl import flags

from launch.flags.checks import listed_in_help
from strategies.registry import ON_REQUEST, check_groups, divides
from towers.errors import UserError
from towers.grid import BRANCH, SLICE, STAGE, Grid

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "grid",
    None,
    "Number of towers and of devices in each tower: data:2,stage:3 (--strategy=pipeline), data:2,slice:2 (slices) "
    "or data:2,branch:2 (branches). Towers divide each batch; the devices of a tower divide the model. Default: "
    "--num_towers (or one) towers of --stages, --slices or --branch_devices devices. --strategy=ring: the towers "
    "of each worker, with stage, slice or branch; default: towers of one device.",
)
listed_in_help(__name__)


def divided_by() -> str | None:
    """The axis along which devices divide a tower: STAGE, SLICE or BRANCH; None if a tower is one device.

    Raises:
      UserError: --grid is malformed, or its towers have one device each.
    """
    axis = divides(FLAGS.strategy)
    if axis != ON_REQUEST:
        return axis or None
    if FLAGS.grid is None:
        return None
    grid = Grid.parse(FLAGS.grid)
    if grid.num_devices == grid.data:
        raise UserError(
            f"--grid={FLAGS.grid} with --strategy={FLAGS.strategy}: its towers are single devices; give stage:2, "
            f"slice:2, branch:2 or more, or --num_towers={grid.data} instead"
        )
    return next(axis for axis in (STAGE, SLICE, BRANCH) if getattr(grid, axis) > 1)


def grid_along(axis: str, flag: str, default: int) -> Grid:
    """The grid of this process's devices, for towers that are divided by slices or branches.

    Args:
      axis: SLICE or BRANCH.
      flag: name of the flag with the number of devices of a tower.
      default: that number if neither the flag nor --grid is given.

    Raises:
      UserError: --grid lacks this axis, or other flags contradict it.
    """
    if FLAGS.grid is None:
        return Grid(**{"data": FLAGS.num_towers or 1, axis: FLAGS[flag].value or default})
    grid = Grid.parse(FLAGS.grid)
    if getattr(grid, axis) < 2:
        raise UserError(f"--grid={FLAGS.grid} with --strategy={FLAGS.strategy}: it needs {axis}:2 or more")
    for name, size in ((flag, getattr(grid, axis)), ("num_towers", grid.data)):
        if FLAGS[name].value not in (None, size):
            raise UserError(
                f"--{name}={FLAGS[name].value} with --grid={FLAGS.grid}: the grid says {size}; omit one"
            )
    return grid


def grid_from_flags(num_stage_devices: int) -> Grid | None:
    """The grid of this process's devices; None if each tower is one device.

    Args:
      num_stage_devices: number of devices of a tower if --grid is not given.

    Raises:
      UserError: --grid is malformed, the strategy can't use it, or --num_towers contradicts it.
    """
    if FLAGS.grid is None:
        if divides(FLAGS.strategy) != STAGE:
            return None
        return Grid(data=FLAGS.num_towers or 1, stage=num_stage_devices)
    grid = Grid.parse(FLAGS.grid)
    check_groups(FLAGS.strategy, grouped=True, grid=f"--grid={FLAGS.grid}")
    if grid.slice > 1 or grid.branch > 1:
        other = "slices" if grid.slice > 1 else "branches"
        raise UserError(f"--grid={FLAGS.grid}: --strategy={FLAGS.strategy} has stages, no {other}; use stage:N")
    if FLAGS.num_towers not in (None, grid.data):
        raise UserError(
            f"--grid={FLAGS.grid} has {grid.data} towers, --num_towers={FLAGS.num_towers}: omit --num_towers"
        )
    return grid
