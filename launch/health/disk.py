"""Free space and write permission, for the run's directory and the temporary folder."""

import os
import pathlib
import shutil
import tempfile

from launch.health.section import Section, gib

# Space for three checkpoints of a large model and its export.
ENOUGH_BYTES = 2 * 2**30


def disk(directory: str) -> Section:
    """Checks --directory, or its nearest existing parent folder, and the temporary folder."""
    facts, problems = {}, []
    folders = [(f"--directory={directory}", "directory", pathlib.Path(directory))]
    try:
        temporary = tempfile.gettempdir()
        folders.append((f"the temporary folder {temporary}", "temporary folder", pathlib.Path(temporary)))
    except OSError as error:
        problems.append(f"no usable temporary folder ({error.strerror}); set TMPDIR to a writable folder")
    for label, name, path in folders:
        present = _nearest_present(path)
        facts[name] = str(path) if present == path else f"{path}, will be created in {present}"
        free_bytes = shutil.disk_usage(present).free
        facts[f"{name} free GiB"] = gib(free_bytes)
        wrong = _why_no_path(path) or _what_is_wrong(present, free_bytes)
        if wrong:
            problems.append(f"{label}: {wrong}")
    return Section(facts=facts, problems=tuple(problems))


def _nearest_present(path: pathlib.Path) -> pathlib.Path:
    path = path.absolute()
    # Unlike Path.exists, also False (not an error) for a path that may not be read.
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


def _why_no_path(path: pathlib.Path) -> str | None:
    """Why no file can have this path, or why this process can't see it."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        return f"{getattr(error, 'strerror', None) or error}; choose another folder"
    return None


def _what_is_wrong(present: pathlib.Path, free_bytes: int) -> str | None:
    try:
        # Reading the permissions is not enough: the file system may be read-only or full.
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        return f"{present} is not writable ({error.strerror}); choose a writable folder"
    if free_bytes < ENOUGH_BYTES:
        return (
            f"only {gib(free_bytes)} GiB are free, and a run may need {gib(ENOUGH_BYTES)} GiB; "
            "free some space or use another disk"
        )
    return None
