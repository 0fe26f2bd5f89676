"""One process of a cluster: its start, its signals and its exit. It leads a session of its own."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import psutil

from launch.supervision.group_guard import GroupGuard
from towers.errors import UserError

_DIE_WITH_LAUNCHER = str(pathlib.Path(__file__).with_name("die_with_launcher.py"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exit:
    """How a process ended.

    Attributes:
      name: the process, as 'worker:1'.
      code: its exit code; -n if signal n killed it.
      sent: the last signal that the launcher sent to end it; None if it ended by itself.
      was_asked: the launcher asked it to end: SIGTERM, or SIGKILL if it was stopped. False with `sent` set: the
        launcher killed it because it did not end in time after the user's signal.
      was_stopped: the process was stopped (SIGSTOP) when the launcher ended it.
      was_interrupted: the user's signal, forwarded by the launcher, killed it before it handled signals.
      lived_seconds: seconds from its start to its end.
    """

    name: str
    code: int
    sent: int | None = None
    was_asked: bool = False
    was_stopped: bool = False
    was_interrupted: bool = False
    lived_seconds: float = 0.0


class Process:
    """A running command. The caller reads its output from `outputs`.

    Attributes:
      name: as 'worker:1'.
      exit: how it ended; None while it runs.
      is_stopped: a signal has stopped it (SIGSTOP).
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], guard: GroupGuard):
        """Args:
        name: as 'worker:1'.
        command: the command to run; if it can't be executed, the exit code is a shell's, 126 or 127.
        environment: the whole environment of the process.
        guard: kills the process's group when the launcher dies.

        Raises:
          UserError: the system lets this process start no other one.
        """
        self.name, self._guard = name, guard
        self.exit: Exit | None = None
        self.is_stopped = False
        self._sent: int | None = None
        self._asked_at: float | None = None
        self._was_stopped = False
        self._forwarded: set[int] = set()
        self._started_at = time.monotonic()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", _DIE_WITH_LAUNCHER, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(environment),
                # The terminal then signals the launcher only, and killpg reaches all that this process starts.
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(
                f"{name} can't be started ({error.strerror}): start fewer processes, or raise the limits that "
                "ulimit -n and ulimit -u show"
            ) from None
        guard.watch(self._popen.pid)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._popen.pid

    @property
    def outputs(self):
        """The pipes to read its standard output and its standard error from."""
        return self._popen.stdout, self._popen.stderr

    def poll(self) -> None:
        """Updates `is_stopped` and `exit`. If the process has ended, kills everything that it started."""
        if self.exit is not None:
            return
        # Not os.waitid, which macOS lacks in Python before 3.13.
        status = self._status()
        self.is_stopped = status == psutil.STATUS_STOPPED
        if status == psutil.STATUS_ZOMBIE:
            # Before the process is reaped: until then no other group can get its number.
            self.send(signal.SIGKILL)
            self._finish()

    def _status(self) -> str:
        try:
            return psutil.Process(self._popen.pid).status()
        except psutil.ZombieProcess:
            return psutil.STATUS_ZOMBIE

    def send(self, number: int) -> None:
        """Sends a signal to the process and to everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)

    def forward(self, number: int) -> None:
        """Like `send`, for a signal of the user; `Exit.was_interrupted` says whether it killed the process."""
        self._forwarded.add(number)
        self.send(number)

    def ask_to_end(self) -> None:
        """Sends SIGTERM once; SIGKILL if the process is stopped, because no other signal reaches it then."""
        if self._sent is None:
            self._asked_at = time.monotonic()
            self._end_by(signal.SIGKILL if self.is_stopped else signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL once."""
        if self._sent != signal.SIGKILL:
            self._end_by(signal.SIGKILL)

    def asked_seconds(self) -> float:
        """Seconds since `ask_to_end`; 0 if it was not called."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def close(self) -> None:
        """Kills the process if it still runs, and waits for its exit."""
        self.kill()
        if self.exit is None:
            self._finish()
        for output in self.outputs:
            output.close()

    def _end_by(self, number: int) -> None:
        self.poll()  # if it has just ended by itself, the launcher did not end it
        if self.exit is None:
            self._sent, self._was_stopped = number, self.is_stopped
            self.send(number)

    def _finish(self) -> None:
        code = self._popen.wait()
        self._guard.forget(self._popen.pid)
        self.is_stopped = False
        self.exit = Exit(
            name=self.name,
            code=code,
            sent=self._sent,
            was_asked=self._asked_at is not None,
            was_stopped=self._was_stopped,
            was_interrupted=-code in self._forwarded,
            lived_seconds=time.monotonic() - self._started_at,
        )
