"""The launcher sees when a process of a cluster is stopped, continues or ends."""

import os
import signal
import time

import pytest

from launch.supervision.group_guard import GroupGuard
from launch.supervision.processes import Process
from tests.towers.user_errors import refused

LIMIT_SECONDS = 20


def wait_until(process: Process, happened) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        process.poll()
        time.sleep(0.01)


@pytest.mark.full
def test_a_process_is_watched_where_python_has_no_waitid(monkeypatch):
    """As on macOS before Python 3.13."""
    monkeypatch.delattr(os, "waitid")
    with GroupGuard() as guard:
        process = Process("worker:0", ["sleep", "60"], os.environ, guard)
        try:
            process.poll()
            assert (process.exit, process.is_stopped) == (None, False)
            process.send(signal.SIGSTOP)
            wait_until(process, lambda: process.is_stopped)
            process.send(signal.SIGCONT)
            wait_until(process, lambda: not process.is_stopped)
            process.send(signal.SIGKILL)
            wait_until(process, lambda: process.exit is not None)
            assert (process.exit.code, process.exit.sent) == (-signal.SIGKILL, None)
        finally:
            process.close()


def test_a_process_that_the_system_does_not_start():
    """Here it refuses a variable that is too long; else a limit is reached."""
    with GroupGuard() as guard, refused("worker:1 can't be started (Argument list too long)", "ulimit -n"):
        Process("worker:1", ["true"], {**os.environ, "TF_CONFIG": "x" * 2**18}, guard)
