"""Keeps Python's garbage collector from searching the objects of imports, which live until the end."""

import contextlib
import gc
import types
from collections.abc import Iterator

from launch.at_import.around_import import around_import


def freeze_imported_objects() -> None:
    """Disables garbage collection during the import of TensorFlow, and later for the objects that exist then.

    On an AMD EPYC (Zen 3) that saves 0.5 of the import's 3.7 seconds, and 0.4 until the end of the first step.
    Only 195 of half a million objects were garbage then.
    """
    around_import("tensorflow", _frozen)


@contextlib.contextmanager
def _frozen(tensorflow: types.ModuleType) -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if collects:
            gc.enable()
