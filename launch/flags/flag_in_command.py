"""Reads a flag of another program's command line, for launchers that start or describe this command."""

import itertools
from collections.abc import Sequence


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
