"""A small process that outlives its launcher by a moment, and kills the process groups that were left behind.

The kernel kills a launcher's children with it (`tied_start.py`), but not what those have started. The guard
is told of every group that begins and ends. When its input ends, as it does even if the launcher is killed, it
kills what is left. It runs as a file, without this package: it imports nothing but the standard library.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable

_BEGINS, _ENDED = "begins", "ended"
_LIMIT_SECONDS = 10


class GroupGuard:
    """Within, groups that are watched die with this process."""

    def __enter__(self) -> "GroupGuard":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait(_LIMIT_SECONDS)

    @property
    def pid(self) -> int:
        """Its own id."""
        return self._process.pid

    def watch(self, group: int) -> None:
        """From now on `group` is killed when this process dies."""
        self._tell(_BEGINS, group)

    def forget(self, group: int) -> None:
        """It has ended: its number may become another's."""
        self._tell(_ENDED, group)

    def _tell(self, what: str, group: int) -> None:
        # A guard that somebody killed is missed, but no reason to end a training.
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{what} {group}\n".encode())
            self._process.stdin.flush()


def kill_what_is_left(lines: Iterable[str]) -> None:
    """Reads to the end, and kills the groups that began and did not end."""
    left = set()
    for line in lines:
        what, _, group = line.partition(" ")
        (left.add if what == _BEGINS else left.discard)(int(group))
    for group in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    kill_what_is_left(sys.stdin)
