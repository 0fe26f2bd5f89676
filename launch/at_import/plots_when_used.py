"""Imports matplotlib when a plot is drawn, not when Keras is imported.

Keras imports matplotlib for two functions that show images, which costs each process half a second and 29 MiB.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator

from launch.at_import.around_import import around_import

# The modules that Keras 3.15 imports. Any other one would be imported at once, and matplotlib with it.
_SUBMODULES = ("pyplot", "patches")


def import_plots_when_used() -> None:
    """Gives Keras stand-ins for modules of matplotlib, which import it when they are used.

    Does nothing if Keras or matplotlib is imported already. If matplotlib is not installed, Keras finds that out.
    """
    around_import("keras", _with_stand_ins)


class _StandIn(types.ModuleType):
    """Stands for the module of the same name, which it imports when an attribute is first read."""

    __path__: list[str] = []

    def __getattr__(self, name: str):
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


def _remove_stand_ins() -> None:
    """Removes the stand-ins, so that later imports get matplotlib."""
    for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
        del sys.modules[name]


@contextlib.contextmanager
def _with_stand_ins(keras: types.ModuleType) -> Iterator[None]:
    """Context manager around the import of Keras."""
    if "matplotlib" in sys.modules or importlib.util.find_spec("matplotlib") is None:
        yield
        return
    package = sys.modules["matplotlib"] = _StandIn("matplotlib")
    for name in _SUBMODULES:
        stand_in = sys.modules[f"matplotlib.{name}"] = _StandIn(f"matplotlib.{name}")
        setattr(package, name, stand_in)
    try:
        yield
    finally:
        _remove_stand_ins()
