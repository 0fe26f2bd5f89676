"""Flags of --strategy=branches. --balance is in launch/flags/pipeline.py."""

from absl import flags

from launch.flags.checks import listed_in_help
from strategies.registry import has_branches
from towers.branches.options import BranchOptions
from towers.errors import UserError
from towers.grid import Grid

FLAGS = flags.FLAGS
_DEFAULT_DEVICES = 2

flags.DEFINE_integer(
    "branch_devices",
    None,
    "For --strategy=branches: number of devices over which the branches of each block of the model are divided. "
    f"Each holds the parameters of its branches with their optimizer state. Default: {_DEFAULT_DEVICES}. Use it "
    "for models such as --model=inception; --balance=time divides by measured times. --num_towers or "
    "--grid=data:2,branch:2 adds towers, which divide the batch.",
)
flags.register_validator("branch_devices", lambda count: count is None or count > 1, message="give 2 or more")
listed_in_help(__name__)


def branched_grid() -> Grid | None:
    """The devices of a strategy that divides the branches of a model; None for other strategies.

    Raises:
      UserError: flags that another strategy refuses, or that contradict each other.
    """
    if not has_branches(FLAGS.strategy):
        if FLAGS.branch_devices is not None:
            raise UserError(
                f"--branch_devices with --strategy={FLAGS.strategy}: only --strategy=branches divides branches; "
                "use it, or omit --branch_devices"
            )
        return None
    if FLAGS.grid is None:
        return Grid(data=FLAGS.num_towers or 1, branch=FLAGS.branch_devices or _DEFAULT_DEVICES)
    grid = Grid.parse(FLAGS.grid)
    if grid.branch < 2:
        raise UserError(f"--grid={FLAGS.grid} with --strategy={FLAGS.strategy}: it needs branch:2 or more")
    for name, size in (("branch_devices", grid.branch), ("num_towers", grid.data)):
        if FLAGS[name].value not in (None, size):
            raise UserError(
                f"--{name}={FLAGS[name].value} with --grid={FLAGS.grid}: the grid says {size}; omit one"
            )
    return grid


def branches_from_flags() -> BranchOptions | None:
    """How branches are balanced; None for a strategy that does not divide them.

    Raises:
      UserError: a balance that is only for pipelines.
    """
    return BranchOptions(balance=FLAGS.balance) if has_branches(FLAGS.strategy) else None
