"""Checks of flags' values, and how flags become visible in --help."""

import sys

from absl import flags

from towers.errors import UserError


def positive(*names: str) -> None:
    """Requires that these flags, where set, are above 0."""
    for name in names:
        flags.register_validator(name, lambda value: value is None or value > 0, message="give a number above 0")


def at_least_zero(*names: str) -> None:
    """Requires that these flags, where set, are 0 or more."""
    for name in names:
        flags.register_validator(name, lambda value: value is None or value >= 0, message="give 0 or more")


def numbers_from(name: str) -> tuple[float, ...] | None:
    """The numbers of a list flag; None if the flag is not set.

    Raises:
      UserError: a word that is not a number.
    """
    words = flags.FLAGS[name].value
    if words is None:
        return None
    try:
        return tuple(float(word) for word in words)
    except ValueError:
        raise UserError(f"--{name}={','.join(words)}: give numbers separated by commas, as 3,1") from None


def listed_in_help(module: str) -> None:
    """Lists the flags that `module` defines in --help of the running program, not only in --helpfull."""
    for flag in flags.FLAGS.get_flags_for_module(module):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
