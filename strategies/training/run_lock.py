"""A lock on a directory: two runs, or two evaluators of a run, that write the same files would spoil them.

    run.lock: 'process 1234 on host', locked with flock until that process ends the run or dies

The operating system releases the lock when its process ends, however it ends, so the file may stay: a restart is
never kept waiting by what is in it.
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
        directory: where the file of the lock is.
        shown: names the directory in the message that another process has the lock; None: as an argument.
        writer: what takes the lock, in that message.
        fix: what to do then, in that message.
        """
        self._path, self._writer, self._fix = directory / LOCK_FILE, writer, fix
        self._shown = shown or f"directory={directory}"
        self._file: TextIO | None = None

    def acquire(self, *, create: bool) -> None:
        """Takes the lock unless it is held already, and writes which process has it.

        Args:
          create: whether to make the file. If not, a directory without it is not locked.

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
            # With a full disk it is locked without a name.
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
        """Gives the lock back, if it is held."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
