"""Reads flags from the command line of another program, which a launcher starts or describes."""

import itertools
import os
from collections.abc import Sequence

from towers.errors import UserError


def flag_value(command: Sequence[str], name: str) -> str | None:
    """The value that absl would parse for the flag `name`: the last one given; None if `command` does not set it.

    Accepts `--name=value` and `--name value`, with one dash or two.
    """
    found = None
    for word, following in itertools.zip_longest(command, command[1:]):
        flag, equals_sign, value = word.partition("=")
        if flag in (f"--{name}", f"-{name}"):
            found = value if equals_sign else following
    return found


def trains(command: Sequence[str]) -> bool:
    """Whether the command is launch.train, and not a program of the user's own, which may have other flags."""
    return any(word == "launch.train" or os.path.basename(word) == "towers-train" for word in command)


def check_resumes(command: Sequence[str], started_again: str) -> None:
    """Raises UserError if the command, when it is started again, would not resume where it ended.

    Args:
      command: the words of the command. A user's own program may have another flag --resume: there only `never` is
        certainly ours.
      started_again: the restarted command in words, as 'a requeued job'.
    """
    resume = flag_value(command, "resume")
    if resume == "never":
        raise UserError(f"--resume=never: {started_again} would begin at step 0; omit --resume")
    if resume not in (None, "auto") and trains(command):
        raise UserError(
            f"--resume={resume}: {started_again} would go back to that checkpoint; train from it once without "
            "restarts, then omit --resume"
        )
