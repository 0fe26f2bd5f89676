"""What the groups of flags share: checks, and their place in --help."""

import sys

from absl import flags

from towers.errors import UserError


def positive(*names: str) -> None:
    """The flags, where given, are more than 0."""
    for name in names:
        flags.register_validator(name, lambda value: value is None or value > 0, message="give a number above 0")


def at_least_zero(*names: str) -> None:
    """The flags, where given, are 0 or more."""
    for name in names:
        flags.register_validator(name, lambda value: value is None or value >= 0, message="give 0 or more")


def numbers_from(name: str) -> tuple[float, ...] | None:
    """A list flag's words as numbers; None where it is not given.

    Raises:
      UserError: a word that is no number.
    """
    words = flags.FLAGS[name].value
    if words is None:
        return None
    try:
        return tuple(float(word) for word in words)
    except ValueError:
        raise UserError(f"--{name}={','.join(words)}: shares are numbers, as 3,1") from None


def listed_in_help(module: str) -> None:
    """The flags that `module` defines stand in --help of whatever program runs, not in --helpfull alone."""
    for flag in flags.FLAGS.get_flags_for_module(module):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
