"""Hides TensorFlow's start-up notices, so that a program prints only its own lines."""

import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def keep_tensorflow_quiet() -> None:
    """Hides the notices that TensorFlow prints while it is imported, whichever module imports it first.

    Does not import TensorFlow: a launcher that only starts other programs needs little memory.
    Does nothing if TF_CPP_MIN_LOG_LEVEL is 0 or 1, which asks for the notices.
    """
    if os.environ.setdefault(_LEVEL, "2") in ("0", "1"):
        return
    # absl's app.run lets TensorFlow's notices from Python through, such as "Reduce to ..." of MirroredStrategy.
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _QuietFinder())


class _QuietFinder(importlib.abc.MetaPathFinder):
    """Finds TensorFlow as Python does, and wraps its loader in a `_QuietLoader`."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _QuietLoader(spec.loader)
        return spec


class _QuietLoader(importlib.abc.Loader):
    """Executes a module while stderr goes to a file, whose text is printed only if the import fails."""

    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader

    def __getattr__(self, name: str):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        # Imported here: importing `launch` imports no other package of this project.
        quiet_stderr = importlib.import_module("towers.quiet_stderr")
        with quiet_stderr.stderr_aside():
            self._loader.exec_module(module)
            # TensorFlow 2.21 prints some notices before it reads its log level, others when it looks for GPUs.
            module.config.list_physical_devices()
