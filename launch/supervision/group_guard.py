"""A small process that kills the process groups that a launcher leaves behind when it dies.

The kernel kills a launcher's children with it (`die_with_launcher.py`), but not the processes that these started.
The launcher reports to the guard every group that begins or ends. The guard's input ends when the launcher
ends, even if it is killed; the guard then kills the groups that have not ended. It runs as a file, without this
package: it imports the standard library only.
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
    """Context manager: while active, watched process groups are killed when this process dies."""

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
        try:
            self._process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            # A signal (SIGSTOP) has stopped the guard.
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._process.pid

    def watch(self, group: int) -> None:
        """From now on, the guard kills `group` when this process dies."""
        self._report(_BEGINS, group)

    def forget(self, group: int) -> None:
        """The group has ended; the system may give its number to another group."""
        self._report(_ENDED, group)

    def _report(self, event: str, group: int) -> None:
        # Training goes on without a guard if somebody killed it.
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{event} {group}\n".encode())
            self._process.stdin.flush()


def kill_remaining_groups(lines: Iterable[str]) -> None:
    """Reads all lines, then kills the groups that began and did not end."""
    left = set()
    for line in lines:
        event, _, group = line.partition(" ")
        (left.add if event == _BEGINS else left.discard)(int(group))
    for group in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    kill_remaining_groups(sys.stdin)
