"""How many parameter servers a command needs, for programs that describe a cluster without joining it."""

from collections.abc import Sequence

from launch.flags.flag_in_command import flag_value
from towers.errors import UserError

# The strategies whose cluster has a chief and servers. Importing their registry would import TensorFlow.
STRATEGIES = ("ps",)
HELP = "Number of parameter servers. Default: 1 if the command has --strategy=ps, otherwise 0."


def num_servers(command: Sequence[str], asked: int | None) -> int:
    """Number of parameter servers; with at least one, the cluster has a chief too.

    Args:
      command: the words of the command that every process runs.
      asked: what the user asked for; None for the default.

    Raises:
      UserError: the command's strategy has servers and `asked` is 0, or it has none and `asked` is not 0.
    """
    strategy = flag_value(command, "strategy")
    if asked is not None and asked < 0:
        raise UserError(f"--ps={asked} is out of range; give a number of parameter servers from 1")
    if strategy in STRATEGIES:
        if asked == 0:
            raise UserError(f"--ps=0: the command has --strategy={strategy}, which needs servers; omit --ps")
        return asked or 1
    if asked and strategy is not None:
        raise UserError(
            f"--ps={asked}: the command has --strategy={strategy}, which has no parameter servers; omit --ps, or "
            f"use --strategy={STRATEGIES[0]}"
        )
    return asked or 0
