"""Checks that several groups of flags share."""

from absl import flags


def positive(*names: str) -> None:
    """The flags, where given, are more than 0."""
    for name in names:
        flags.register_validator(name, lambda value: value is None or value > 0, message="give a number above 0")


def at_least_zero(*names: str) -> None:
    """The flags, where given, are 0 or more."""
    for name in names:
        flags.register_validator(name, lambda value: value is None or value >= 0, message="give 0 or more")
