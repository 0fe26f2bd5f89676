"""Flags that name a file or folder."""

import os

from absl import flags

# absl lists the flags under the module that calls `define_path`.
flags.disclaim_key_flags()


class _PathParser(flags.ArgumentParser):
    """A path with ~ expanded: the shell does not do that after `--directory=`."""

    def parse(self, argument: str) -> str:
        return os.path.expanduser(argument)

    def flag_type(self) -> str:
        return "string"


def define_path(name: str, default: str | None, help: str) -> None:
    """Defines a flag whose value is a path."""
    flags.DEFINE(_PathParser(), name, default, help, serializer=flags.ArgumentSerializer())
