"""Runs code before and after a module is imported, whichever module imports it first."""

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager

Around = Callable[[types.ModuleType], AbstractContextManager]


def around_import(name: str, around: Around) -> None:
    """When a module is imported, executes it inside a context manager. The last call's manager is outermost.

    Does nothing if the module is imported already.

    Args:
      name: name of a top-level module.
      around: returns the context manager for the module that is about to be executed.
    """
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name, around))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as Python does, and wraps its loader in a `_Loader`.

    Finds it each time until it is imported: some code only asks whether the module exists.
    """

    def __init__(self, name: str, around: Around):
        self._name, self._around = name, around
        self._is_asking = False

    def find_spec(self, fullname, path, target=None):
        if fullname != self._name or self._is_asking or fullname in sys.modules:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None:
            spec.loader = _Loader(spec.loader, self._around)
        return spec


class _Loader(importlib.abc.Loader):
    """Executes a module as another loader does, inside a context manager."""

    def __init__(self, loader: importlib.abc.Loader, around: Around):
        self._loader, self._around = loader, around

    def __getattr__(self, name: str):
        if name == "_loader":
            raise AttributeError(name)  # `copy` makes an object without __init__
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        with self._around(module):
            self._loader.exec_module(module)
