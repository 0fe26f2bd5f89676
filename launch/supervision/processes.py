"""One process of a cluster: its start, its signals, its end. It leads a session of its own."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from launch.supervision.group_guard import GroupGuard

_TIED_START = str(pathlib.Path(__file__).with_name("tied_start.py"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """How a process ended.

    Attributes:
      name: as 'worker:1'.
      code: its exit code; -n where signal n killed it.
      sent: the signal by which the launcher ended it; None where it ended without.
      asked: it was asked to end before it was killed; a process that is killed unasked was given a signal by the
        user, and did not obey it in time.
      stood_still: it was stopped (SIGSTOP) when it was ended.
    """

    name: str
    code: int
    sent: int | None = None
    asked: bool = False
    stood_still: bool = False


class Process:
    """A running command. Its output is for the caller to read: `outputs` are the two ends of pipes."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], guard: GroupGuard):
        """Args:
        name: as 'worker:1'.
        command: what runs; a program that can't be run ends with a shell's exit code, 126 or 127.
        environment: all of its environment.
        guard: kills its group when this process dies.
        """
        self.name, self._guard = name, guard
        self.end: End | None = None
        self.stopped = False
        self._sent: int | None = None
        self._asked_at: float | None = None
        self._stood_still = False
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", _TIED_START, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(environment),
            # A terminal's signals reach the launcher alone, and a killpg reaches whatever this one starts.
            start_new_session=True,
        )
        guard.watch(self._popen.pid)

    @property
    def outputs(self):
        """Its standard output and its standard error."""
        return self._popen.stdout, self._popen.stderr

    def look(self) -> None:
        """Brings `stopped` and `end` up to date. What an ended process has started is killed."""
        if self.end is not None:
            return
        options = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        status = os.waitid(os.P_PID, self._popen.pid, options)
        self.stopped = status is not None and status.si_code == os.CLD_STOPPED
        if status is not None and not self.stopped:
            # Before it is reaped: its group's number is still its own.
            self.send(signal.SIGKILL)
            self._finish()

    def send(self, number: int) -> None:
        """A signal to it and to what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)

    def ask_to_end(self) -> None:
        """SIGTERM, once; SIGKILL to one that is stopped, which no other signal wakes."""
        if self._sent is None:
            self._asked_at = time.monotonic()
            self._end_by(signal.SIGKILL if self.stopped else signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, once."""
        if self._sent != signal.SIGKILL:
            self._end_by(signal.SIGKILL)

    def asked_seconds(self) -> float:
        """Seconds since it was asked to end; 0 if it was not."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def close(self) -> None:
        """Kills it if it still runs, and waits for its end."""
        self.kill()
        if self.end is None:
            self._finish()
        for output in self.outputs:
            output.close()

    def _end_by(self, number: int) -> None:
        self.look()  # what ended by itself a moment ago was not ended by us
        if self.end is None:
            self._sent, self._stood_still = number, self.stopped
            self.send(number)

    def _finish(self) -> None:
        code = self._popen.wait()
        self._guard.forget(self._popen.pid)
        self.stopped = False
        self.end = End(
            name=self.name,
            code=code,
            sent=self._sent,
            asked=self._asked_at is not None,
            stood_still=self._stood_still,
        )
