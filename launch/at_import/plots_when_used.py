"""Imports matplotlib when a plot is drawn, not when Keras is imported.

Keras imports it for two functions that show images, which costs each process half a second and 29 MiB.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

# What Keras 3.15 imports. Whatever else it asks for is imported at once, and matplotlib with it.
_SUBMODULES = ("pyplot", "patches")


def import_plots_when_used() -> None:
    """Gives Keras stand-ins for modules of matplotlib, which import it when they are used.

    Does nothing if Keras or matplotlib is imported already. Without matplotlib Keras hears so, as ever.
    """
    if "keras" not in sys.modules and "matplotlib" not in sys.modules:
        sys.meta_path.insert(0, _KerasFinder())


class _StandIn(types.ModuleType):
    """A module whose attributes are those of the module of its name, imported when one is asked for."""

    __path__: list[str] = []

    def __getattr__(self, name: str):
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


def _remove_stand_ins() -> None:
    """So that whoever imports matplotlib from now on gets matplotlib."""
    for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
        del sys.modules[name]


class _KerasFinder(importlib.abc.MetaPathFinder):
    """Finds Keras as Python does, and wraps its loader in a `_KerasLoader`."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and "matplotlib" not in sys.modules and importlib.util.find_spec("matplotlib"):
            spec.loader = _KerasLoader(spec.loader)
        return spec


class _KerasLoader(importlib.abc.Loader):
    """Executes Keras's modules while the stand-ins are in place."""

    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader

    def __getattr__(self, name: str):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        package = sys.modules["matplotlib"] = _StandIn("matplotlib")
        for name in _SUBMODULES:
            stand_in = sys.modules[f"matplotlib.{name}"] = _StandIn(f"matplotlib.{name}")
            setattr(package, name, stand_in)
        try:
            self._loader.exec_module(module)
        finally:
            _remove_stand_ins()
