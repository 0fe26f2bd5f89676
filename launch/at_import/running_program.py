"""The program of launch/ that is running, from its command line."""

import os
import sys


def running_program() -> str | None:
    """Name of the running program of launch/, as its messages begin; None in a program of a user's own."""
    # While Python looks for the module of `python -m launch.train --steps=5`, argv is ['-m', '--steps=5'].
    if sys.argv[0] == "-m":
        module = sys.orig_argv[len(sys.orig_argv) - len(sys.argv)].removeprefix("-m")
        return module.removeprefix("launch.") if module.startswith("launch.") else None
    script = os.path.basename(sys.argv[0])
    return script if script.startswith("towers-") else None
