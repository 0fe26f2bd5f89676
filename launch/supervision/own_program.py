"""Builds the command of a program of this project, so that no file in the current folder shadows our modules.

`python -m launch.train` puts the current folder first on sys.path. There a user's own models.py would be imported
instead of our `models`, and a random.py instead of the standard library's.
"""

import os
import pathlib
import site
import sys

_ROOT = os.path.realpath(pathlib.Path(__file__).parents[2])


def own_program(module: str, *arguments: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command that runs `module` without the current folder on sys.path, and the variables that it needs.

    Args:
      module: a module of this project, as 'launch.train'.
      *arguments: the program's arguments.
    """
    return (sys.executable, "-P", "-m", module, *arguments), own_variables()


def own_variables() -> dict[str, str]:
    """The environment variables that let another Python process import our packages."""
    return {"PYTHONPATH": os.pathsep.join(_python_path())}


def _python_path() -> list[str]:
    """PYTHONPATH's entries, after the folder that holds our packages if they are not installed."""
    # An empty entry, as in `PYTHONPATH=$PYTHONPATH:folder`, means the current folder.
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # PYTHONPATH precedes the standard library, so it must not hold site-packages.
    installed = map(os.path.realpath, (*site.getsitepackages(), site.getusersitepackages()))
    return given if _ROOT in installed else [_ROOT, *(entry for entry in given if entry != _ROOT)]
