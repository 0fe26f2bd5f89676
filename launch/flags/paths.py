"""Flags that name a file or folder."""

import os
from collections.abc import Sequence

from absl import flags

# absl lists the flags under the module that calls `define_path`.
flags.disclaim_key_flags()


class _PathParser(flags.ArgumentParser):
    """A path with ~ expanded: the shell does not do that after `--directory=`.

    Attributes:
      words: values that are no paths.
    """

    def __init__(self, words: tuple[str, ...]):
        self.words = words

    def parse(self, argument: str) -> str:
        return os.path.expanduser(argument)

    def flag_type(self) -> str:
        return "string"


def define_path(name: str, default: str | None, help: str, *, words: Sequence[str] = ()) -> None:
    """Defines a flag whose value is a path, or one of `words`."""
    flags.DEFINE(_PathParser(tuple(words)), name, default, help, serializer=flags.ArgumentSerializer())


def absolute_value(flag: flags.Flag) -> object:
    """The flag's value, a path as an absolute one. URLs, as gs://bucket/data, are absolute already."""
    value, parser = flag.value, flag.parser
    if not isinstance(parser, _PathParser) or not value or value in parser.words or "://" in value:
        return value
    return os.path.abspath(value)
