"""Checks that Python finds this project's own `towers`, `models` and `strategies`, not others of the same names.

A models.py in the current folder, or an installed distribution with a package `towers`, would otherwise cause an
error somewhere in the middle of this project. The check needs only the standard library and imports no package.
"""

import importlib.util
import os

from launch.at_import.refused_import import refuse_import

_PACKAGES = ("towers", "models", "strategies")


def check_own_packages() -> None:
    """Returns if all packages of this project lie side by side.

    Raises:
      ImportError: one does not. The message names the other file; a program of launch/ prints it and exits.
    """
    for name in _PACKAGES:
        problem = _problem(name)
        if problem is not None:
            refuse_import(problem, name)


def _problem(name: str) -> str | None:
    """Why Python would not import this project's package `name`; None if it would."""
    expected = os.path.join(_own_root(), name)
    rule = f"{', '.join(_PACKAGES)} and launch must be found in one folder"
    spec = importlib.util.find_spec(name)
    if spec is None:
        return f"no package {name!r} in {_own_root()}: {rule}; install this project again"
    found = _location(spec)
    if os.path.realpath(found) == os.path.realpath(os.path.join(expected, "__init__.py")):
        return None
    return f"{name!r} would be imported from {found}, not from {expected}: {rule}; {_fix(found)}"


def _location(spec) -> str:
    """File of a module or package; folder of a package without an __init__.py."""
    if spec.has_location:
        return spec.origin
    return next(iter(spec.submodule_search_locations or ()), str(spec.origin))


def _fix(found: str) -> str:
    intruder = os.path.dirname(found) if os.path.basename(found) == "__init__.py" else found
    if os.path.dirname(os.path.realpath(intruder)) == os.path.realpath(os.curdir):
        return f"rename {intruder}, or start from another folder"
    return f"rename {intruder}, remove its folder from PYTHONPATH, or uninstall the distribution that brought it"


def _own_root() -> str:
    """The folder that holds `launch`."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
