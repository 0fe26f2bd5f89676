"""Folders that look like Linux's control groups, and a real one."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import pytest

_REAL = pathlib.Path("/sys/fs/cgroup/memory")


def linux(folder: pathlib.Path, groups: str, **files: str) -> pathlib.Path:
    """A root with /proc/self/cgroup and files below /sys/fs/cgroup."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@contextlib.contextmanager
def real_memory_group(limit_bytes: int) -> Iterator[pathlib.Path]:
    """A control group (version 1) with a memory limit; its processes must have ended when it is left."""
    group = _REAL / f"towers-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()
