"""Room and the right to write, where runs are kept and where temporary files go."""

import pathlib
import shutil
import tempfile

from launch.health.section import Section, gib

# Three checkpoints of a large model, and its export.
ENOUGH_BYTES = 2 * 2**30


def disk(directory: str) -> Section:
    """Looks at --directory, or the nearest folder above it that is there, and at the temporary folder."""
    facts, problems = {}, []
    places = [(f"--directory={directory}", "directory", pathlib.Path(directory))]
    try:
        temporary = tempfile.gettempdir()
        places.append((f"the temporary folder {temporary}", "temporary folder", pathlib.Path(temporary)))
    except OSError as error:
        problems.append(f"there is no temporary folder, {error.strerror}: set TMPDIR to one that can be written")
    for called, name, path in places:
        present = _nearest_present(path)
        facts[name] = str(path) if present == path else f"{path}, to be made in {present}"
        free_bytes = shutil.disk_usage(present).free
        facts[f"{name} free GiB"] = gib(free_bytes)
        wrong = _what_is_wrong(present, free_bytes)
        if wrong:
            problems.append(f"{called}: {wrong}")
    return Section(facts=facts, problems=tuple(problems))


def _nearest_present(path: pathlib.Path) -> pathlib.Path:
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _what_is_wrong(present: pathlib.Path, free_bytes: int) -> str | None:
    try:
        # Rights alone don't tell: the file system may be read-only, or full. This file has no name to leave.
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        return f"{present} can't be written ({error.strerror}); give a folder that can be written"
    if free_bytes < ENOUGH_BYTES:
        return (
            f"{gib(free_bytes)} GiB are free, and {gib(ENOUGH_BYTES)} are wanted: make room or take another disk"
        )
    return None
