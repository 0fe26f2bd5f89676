"""Checks that Keras will have TensorFlow as its backend, before Keras is imported."""

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping

from launch.at_import.refused_import import refuse_import

_NEEDED = "tensorflow"


def check_keras_backend() -> None:
    """Returns if the backend is TensorFlow.

    Raises:
      ImportError: the backend is another one. A program of launch/ prints that in one line and exits instead.
    """
    backend = keras_backend(os.environ)
    if backend != _NEEDED:
        refuse_import(
            f"the Keras backend is {backend!r}, but this project needs {_NEEDED}: unset KERAS_BACKEND, or set it "
            f"to {_NEEDED}, which overrides ~/.keras/keras.json",
            "keras",
        )


def keras_backend(environment: Mapping[str, str]) -> str:
    """The backend that Keras will have: KERAS_BACKEND, else that of its configuration file."""
    named = environment.get("KERAS_BACKEND")
    if named:
        return named
    folder = environment.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((pathlib.Path(folder) / "keras.json").read_text()).get("backend", _NEEDED)
    return _NEEDED
