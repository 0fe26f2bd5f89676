"""Saves the trained model as a `.keras` file, which does not depend on how it was trained."""

import os
import pathlib
import tempfile

import keras

from strategies.atomic_write import flush
from towers.errors import UserError


def save_model(model: keras.Model, path: pathlib.Path) -> pathlib.Path:
    """Writes the file atomically, replaces an older one, and returns its absolute path.

    Raises:
      UserError: the path does not end in .keras, or can't be written.
    """
    path = path.absolute()
    if path.suffix != ".keras":
        raise UserError(f"export to {path}: a Keras model's file ends in .keras; use {path.with_suffix('.keras')}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".keras")
        os.close(handle)
        try:
            model.save(temporary)
            os.chmod(temporary, 0o644)
            flush(pathlib.Path(temporary))
            os.replace(temporary, path)
        finally:
            pathlib.Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path}: can't write the model there ({error.strerror}); make room or choose another path"
        ) from error
    return path
