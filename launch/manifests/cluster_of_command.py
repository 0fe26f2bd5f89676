"""The cluster that a command needs, for programs that describe the cluster without joining it."""

from collections.abc import Sequence

from launch.flags.flag_in_command import flag_value, trains
from towers.errors import UserError

# The strategies whose cluster has a chief and servers. Importing their registry would import TensorFlow.
STRATEGIES = ("ps",)
OF_ONE_PROCESS = ("towers", "slices", "branches", "mirrored", "pipeline")
HELP = "Number of parameter servers. Default: 1 if the command has --strategy=ps, otherwise 0."


def num_servers(command: Sequence[str], asked: int | None) -> int:
    """Number of parameter servers; with at least one, the cluster has a chief too.

    Args:
      command: the words of the command that every process runs.
      asked: the number that the user gave; None for the default.

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


def check_cluster(command: Sequence[str], num_processes: int, asked: str) -> None:
    """Raises UserError if several processes would run launch.train with a strategy that runs in one process.

    Args:
      command: the words of the command that every process runs. A flag file or a recipe may choose the strategy.
      num_processes: number of processes.
      asked: the flags that gave this number.
    """
    is_open = any(word.startswith(("-flagfile", "--flagfile", "-recipe", "--recipe")) for word in command)
    strategy = flag_value(command, "strategy") or OF_ONE_PROCESS[0]
    if num_processes > 1 and trains(command) and not is_open and strategy in OF_ONE_PROCESS:
        raise UserError(
            f"{asked}: {num_processes} processes, but --strategy={strategy} runs in one: ask for one, or use "
            "--strategy=ring or --strategy=ps in the command"
        )
