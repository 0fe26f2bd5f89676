"""Saves the trained model as a `.keras` file, which does not depend on how it was trained.

    model.keras.k3v_9x0a.new/    temporary folder of an export to model.keras
        run.lock                 locked until that export ends or its process dies
        model.keras              moved beside the folder when it is complete

If memory is short, Keras creates a temporary file beside the file that it writes: so it is in the folder too.
"""

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator

import keras

from strategies.atomic_write import UNFINISHED, flush
from strategies.training.run_lock import LOCK_FILE, RunLock
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
        _remove_unfinished(path)
        with _folder_beside(path) as folder:
            model.save(folder / path.name)
            flush(folder / path.name)
            os.replace(folder / path.name, path)
    except OSError as error:
        raise UserError(
            f"{path}: can't write the model there ({error.strerror}); make room or choose another path"
        ) from error
    return path


@contextlib.contextmanager
def _folder_beside(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Context manager: a temporary folder for this export only, locked, and removed at the end."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{path.name}.", suffix=UNFINISHED, dir=path.parent))
    lock = RunLock(folder)
    try:
        lock.acquire(create=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _remove_unfinished(path: pathlib.Path) -> None:
    """Removes the temporary folders of exports to `path` that were killed, not those of running exports."""
    own = re.compile(rf"{re.escape(path.name)}\.[a-z0-9_]{{8}}{re.escape(UNFINISHED)}")
    for folder in path.parent.iterdir():
        if own.fullmatch(folder.name) and (folder / LOCK_FILE).exists():
            lock = RunLock(folder)
            with contextlib.suppress(UserError):
                lock.acquire(create=False)
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
