"""Flags of --strategy=slices."""

from absl import flags

from launch.flags.belonging import misplaced
from launch.flags.checks import listed_in_help
from launch.flags.grid import divided_by, grid_along
from strategies.registry import divides
from strategies.slices import SliceOptions
from towers.errors import UserError
from towers.grid import BRANCH, SLICE, Grid
from towers.slices.splits import SPLITS

FLAGS = flags.FLAGS
_DEFAULT_SLICES = 2

flags.DEFINE_integer(
    "slices",
    None,
    "For --strategy=slices: number of devices over which the layers of a tower are divided. Each "
    f"holds its part of the parameters with their optimizer state. Default: {_DEFAULT_SLICES}. Use it for a model "
    "that is larger than a device. --num_towers or --grid=data:2,slice:2 adds towers, which divide the batch.",
)
flags.DEFINE_list(
    "layout",
    [],
    "For --strategy=slices, and --strategy=ring with --grid=slice:2: how layers are split, as PATTERN=SPLIT,...; "
    f"SPLIT is one of {', '.join(SPLITS)}. A pattern is a layer's path, in which * is any text: "
    "--layout='position_embedding=whole,block_*/mlp_up=columns'. The first matching pattern counts; layers that "
    "match none keep their defaults, which --show_layout prints.",
)
flags.DEFINE_bool(
    "show_layout",
    False,
    "Print how a tower is divided, and exit. --strategy=slices: each parameter's shape, split, bytes of each "
    "device and collective. --strategy=branches: each branch's device and cost.",
)
flags.register_validator("slices", lambda count: count is None or count > 1, message="give 2 or more")
listed_in_help(__name__)


def sliced_grid() -> Grid | None:
    """The devices of a strategy that divides the layers of a tower; None for other strategies.

    Raises:
      UserError: flags of slices with another strategy, or flags that contradict each other.
    """
    if divided_by() != SLICE:
        _refuse("slices", "layout", "show_layout")
        return None
    if divides(FLAGS.strategy) != SLICE:
        _refuse("show_layout")
    return grid_along(SLICE, "slices", _DEFAULT_SLICES)


def slices_from_flags() -> SliceOptions | None:
    """The options of slices; None if a tower's layers are not divided.

    Raises:
      UserError: a part of --layout has no '='.
    """
    if divided_by() != SLICE:
        return None
    table = []
    for part in FLAGS.layout:
        pattern, equals, split = part.partition("=")
        if not equals or not pattern:
            raise UserError(
                f"--layout: {part!r} has no form PATTERN=SPLIT; give for example position_embedding=whole"
            )
        table.append((pattern.strip(), split.strip()))
    return SliceOptions(layout=tuple(table))


def _refuse(*names: str) -> None:
    for name in names:
        if FLAGS[name].value and not (name == "show_layout" and divides(FLAGS.strategy) == BRANCH):
            others = " or branches" if name == "show_layout" else ", or --strategy=ring with --grid=slice:2"
            raise misplaced(name, "strategy", f"strategy=slices{others}")
