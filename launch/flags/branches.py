"""Flags of branches (--strategy=branches, or a grid with branches on a ring). --balance is in pipeline.py."""

from absl import flags

from launch.flags.belonging import misplaced
from launch.flags.checks import listed_in_help
from launch.flags.grid import divided_by, grid_along
from towers.branches.options import BranchOptions
from towers.grid import BRANCH, Grid

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
      UserError: flags of branches with another strategy, or flags that contradict each other.
    """
    if divided_by() != BRANCH:
        if FLAGS.branch_devices is not None:
            owners = "strategy=branches, or --strategy=ring with --grid=branch:2"
            raise misplaced("branch_devices", "strategy", owners)
        return None
    return grid_along(BRANCH, "branch_devices", _DEFAULT_DEVICES)


def branches_from_flags() -> BranchOptions | None:
    """The options of branches; None if a tower's branches are not divided.

    Raises:
      UserError: --balance has a value that only pipelines support.
    """
    return BranchOptions(balance=FLAGS.balance) if divided_by() == BRANCH else None
