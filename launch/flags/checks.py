"""Checks of flags' values, and how flags become visible in --help."""

import math
import sys

from absl import flags

from towers.errors import UserError
from towers.hardware.cores import MOST_CORES


def positive(*names: str) -> None:
    """Requires that these flags, where set, are above 0 and finite."""
    for name in names:
        flags.register_validator(name, lambda value: value is None or value > 0, message="give a number above 0")
        _finite(name)


def at_least_zero(*names: str) -> None:
    """Requires that these flags, where set, are 0 or more and finite."""
    for name in names:
        flags.register_validator(name, lambda value: value is None or value >= 0, message="give 0 or more")
        _finite(name)


def number_of_threads(name: str) -> None:
    """Requires that this flag, where set, is a number of threads that a machine can run."""
    positive(name)
    message = f"give at most {MOST_CORES}, one for each core"
    flags.register_validator(name, lambda value: value is None or value <= MOST_CORES, message=message)


def _finite(name: str) -> None:
    flags.register_validator(name, lambda value: value is None or value < math.inf, message="give a finite number")


def numbers_from(name: str) -> tuple[float, ...] | None:
    """The numbers of a list flag; None if the flag is not set.

    Raises:
      UserError: an item of the list is not a number.
    """
    words = flags.FLAGS[name].value
    if words is None:
        return None
    try:
        return tuple(float(word) for word in words)
    except ValueError:
        raise UserError(f"--{name}={','.join(words)}: give numbers separated by commas, as 3,1") from None


def listed_in_help(module: str) -> None:
    """Shows the flags that `module` defines in the running program's --help, not only in --helpfull."""
    for flag in flags.FLAGS.get_flags_for_module(module):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
