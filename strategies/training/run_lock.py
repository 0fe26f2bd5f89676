"""A lock on a directory: two runs, or two evaluators of a run, would corrupt files that both write.

    run.lock: 'process 1234 on host', locked with flock until that process ends the run or dies

The operating system releases the lock when its process ends, however it ends. So the file may stay: its contents
never delay a restart.
"""

import contextlib
import fcntl
import os
import pathlib
import socket
from typing import TextIO

from towers.errors import UserError

LOCK_FILE = "run.lock"


class RunLock:
    """The lock of one directory. Where the file system has no locks, it does nothing."""

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        shown: str | None = None,
        writer: str = "run",
        fix: str = "wait for its end, stop it, or choose another directory",
    ):
        """Args:
        directory: directory of the lock file.
        shown: the directory's name in the error if another process has the lock; None: as an argument.
        writer: what takes the lock, for that error.
        fix: what the user can do, for that error.
        """
        self._path, self._writer, self._fix = directory / LOCK_FILE, writer, fix
        self._shown = shown or f"directory={directory}"
        self._file: TextIO | None = None

    def acquire(self, *, create: bool) -> None:
        """Takes the lock unless this process already holds it, and writes the process's name to the file.

        Args:
          create: whether to create the lock file. If not, a directory without the file is not locked.

        Raises:
          UserError: another process has it.
        """
        if self._file is not None:
            return
        with contextlib.ExitStack() as ends, contextlib.suppress(OSError):
            flags = os.O_RDWR | (os.O_CREAT if create else 0)
            file = ends.enter_context(os.fdopen(os.open(self._path, flags, 0o644), "r+", errors="replace"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._in_use(file) from None
            # With a full disk the file is locked, but has no name.
            with contextlib.suppress(OSError):
                file.truncate()
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
            self._file = file
            ends.pop_all()

    def _in_use(self, file: TextIO) -> UserError:
        other = "another process"
        with contextlib.suppress(OSError):
            other = file.read().strip() or other
        return UserError(
            f"{self._shown}: {other} writes there, and only one {self._writer} at a time can: "
            f"{self._fix} (if that process is gone, remove {self._path})"
        )

    def release(self) -> None:
        """Releases the lock, if it is held."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
