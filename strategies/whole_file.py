"""Files written whole: a reader, or who comes after a crash, finds the old contents or the new ones."""

import os
import pathlib

UNFINISHED = ".new"


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a text in place of what was there.

    Raises:
      OSError: it can't be written; what was there stays.
    """
    temporary = path.with_name(path.name + UNFINISHED)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: pathlib.Path) -> None:
    """Waits until a file's contents, or a directory's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
