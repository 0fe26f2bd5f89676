"""Keeps Python from looking for garbage among the objects of imports, which stay until the end."""

import contextlib
import gc
import types
from collections.abc import Iterator

from launch.at_import.around_import import around_import


def freeze_imported_objects() -> None:
    """Collects no garbage while TensorFlow is imported, nor later among the objects that exist then.

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
