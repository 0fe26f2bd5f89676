"""Atomic writes: a reader, also after a crash, finds either the old contents of a file or the new ones."""

import os
import pathlib

UNFINISHED = ".new"


def write_atomically(path: pathlib.Path, contents: str | bytes) -> None:
    """Replaces the contents of a file.

    Raises:
      OSError: the file can't be written; its old contents remain.
    """
    temporary = path.with_name(path.name + UNFINISHED)
    try:
        temporary.write_bytes(contents.encode("utf-8") if isinstance(contents, str) else contents)
        flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: pathlib.Path) -> None:
    """Blocks until a file's contents, or a directory's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
