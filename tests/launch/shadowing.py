"""Files in the current folder that would shadow our packages, TensorFlow and the standard library."""

import pathlib

_NAMES = ("models", "towers", "tensorflow", "numpy", "random", "signal", "ctypes", "contextlib", "json")


def write_intruders(folder: pathlib.Path) -> None:
    """Modules that raise when they are imported."""
    for name in _NAMES:
        (folder / f"{name}.py").write_text(f'raise RuntimeError("imported {name}.py of the current folder")\n')
