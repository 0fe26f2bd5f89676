"""Runs a row: starts its processes, watches them, reads the measurement, and leaves none behind."""

import contextlib
import json
import time
from collections.abc import Callable, Sequence

from launch import binary
from launch.measuring.case import Case
from launch.measuring.members import members_of
from launch.measuring.memory_watch import MemoryWatch
from launch.supervision.group_guard import GroupGuard
from launch.supervision.line_relay import LineRelay
from launch.supervision.outcome import Outcome, described
from launch.supervision.processes import Process
from strategies.errors import PeerLost
from towers.errors import UserError

_TICK_SECONDS = 0.1
# Time to read what ended processes left in their pipes.
_LAST_OUTPUT_SECONDS = 1.0
# Time that the others have to fail too after one has failed: the cause is the one that did not just lose a peer.
_CAUSE_SECONDS = 1.0
_ERROR = ": error: "


class Interrupted(Exception):
    """A signal ended the measurement of a row."""


def run_case(case: Case, *, timeout_seconds: float, is_interrupted: Callable[[], bool]) -> dict:
    """Runs a case; returns the JSON object that it prints last, with 'peak_memory_bytes' of all its processes.

    Leaves no process and no network, whatever happens.

    Args:
      case: the case.
      timeout_seconds: seconds after which the processes are killed.
      is_interrupted: whether this process received a signal to end.

    Raises:
      Interrupted: `is_interrupted()` became True.
      PeerLost: a process failed, or the time is over. The message contains the last line of its stderr.
      UserError: a process ended with exit code 2, a user's mistake.
    """
    lines = LastLines()
    with contextlib.ExitStack() as stack:
        members = stack.enter_context(members_of(case))
        guard = stack.enter_context(GroupGuard())
        processes = [
            stack.enter_context(contextlib.closing(Process(one.name, one.command, one.environment, guard)))
            for one in members
        ]
        relay = LineRelay(lines)
        for process in processes:
            relay.add(process.name, *process.outputs)
        with MemoryWatch([process.pid for process in processes]) as memory:
            _wait(processes, relay, time.monotonic() + timeout_seconds, is_interrupted)
    _check(case, processes, lines, timeout_seconds)
    return measurement(case, lines.last(processes[0].name)) | {"peak_memory_bytes": memory.peak_bytes}


def measurement(case: Case, line: str) -> dict:
    """The JSON object in the last line of output.

    Raises:
      PeerLost: the line is not a JSON object.
    """
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        raise PeerLost(f"{case.name}: its last line is no measurement but {line!r}") from None


def _wait(
    processes: Sequence[Process], relay: LineRelay, deadline: float, is_interrupted: Callable[[], bool]
) -> None:
    """Returns when all processes have ended, one has failed, or the time is over."""
    while time.monotonic() < deadline and any(process.exit is None for process in processes):
        relay.pass_on(_TICK_SECONDS)
        if is_interrupted():
            raise Interrupted
        for process in processes:
            process.poll()
        if any(process.exit is not None and process.exit.code for process in processes):
            deadline = min(deadline, time.monotonic() + _CAUSE_SECONDS)
    until = time.monotonic() + _LAST_OUTPUT_SECONDS
    while relay.reads and time.monotonic() < until:
        relay.pass_on(_TICK_SECONDS)
    relay.close()


def _check(case: Case, processes: Sequence[Process], lines: "LastLines", timeout_seconds: float) -> None:
    """Raises an error if a process did not end by itself and successfully."""
    cause = Outcome(exits=tuple(process.exit for process in processes), interrupted=False).cause
    if cause is None:
        return
    if cause.sent is not None:
        raise PeerLost(
            f"{case.name}: {cause.name} did not end within --row_timeout_seconds={timeout_seconds:g}; raise it, "
            "or lower --measured_steps or --measured_batch"
        )
    kind = UserError if cause.code == binary.USER_ERROR else PeerLost
    raise kind(f"{case.name}: {cause.name} failed, {described(cause)}: {lines.complaint(cause.name)}")


class LastLines:
    """A screen that shows nothing and keeps the last lines of each process."""

    def __init__(self):
        self._out: dict[str, str] = {}
        self._complaints: dict[str, str] = {}
        self._errors: dict[str, str] = {}

    def line(self, name: str, line: bytes, *, is_error: bool) -> None:
        text = line.decode(errors="replace").strip()
        if text:
            (self._complaints if is_error else self._out)[name] = text
            if is_error and _ERROR in text:
                self._errors[name] = text.partition(_ERROR)[2]

    def close(self) -> None:
        pass

    def last(self, name: str) -> str:
        """The last line of a process's standard output."""
        return self._out.get(name, "")

    def complaint(self, name: str) -> str:
        """The last line of a process's standard error that reports an error, else the last line."""
        return self._errors.get(name) or self._complaints.get(name) or "no message"
