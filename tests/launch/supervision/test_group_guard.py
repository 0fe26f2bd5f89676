"""The guard kills the process groups that have started and not ended."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from launch.supervision import group_guard
from launch.supervision.group_guard import GroupGuard, kill_remaining_groups

SLEEP = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)")


@pytest.fixture
def groups():
    started = [subprocess.Popen(SLEEP, start_new_session=True) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_groups_that_ended_are_not_killed(groups):
    left, ended = groups
    kill_remaining_groups([f"begins {left.pid}\n", f"begins {ended.pid}\n", f"ended {ended.pid}\n"])
    assert left.wait(20) == -signal.SIGKILL
    assert ended.poll() is None


def test_a_group_that_no_longer_exists():
    gone = subprocess.Popen((sys.executable, "-I", "-S", "-c", ""), start_new_session=True)
    gone.wait()
    kill_remaining_groups([f"begins {gone.pid}\n"])


def test_the_guard_kills_at_the_end_of_its_context(groups):
    left, ended = groups
    with GroupGuard() as guard:
        guard.watch(left.pid)
        guard.watch(ended.pid)
        guard.forget(ended.pid)
        assert left.poll() is None
    assert left.wait(20) == -signal.SIGKILL
    assert ended.poll() is None


def test_a_killed_guard_raises_nothing(groups):
    with GroupGuard() as guard:
        os.kill(guard.pid, signal.SIGKILL)
        for _ in range(100):
            guard.watch(groups[0].pid)
    assert groups[0].poll() is None


def test_a_stopped_guard_raises_nothing(monkeypatch):
    monkeypatch.setattr(group_guard, "_LIMIT_SECONDS", 0.1)
    with GroupGuard() as guard:
        os.kill(guard.pid, signal.SIGSTOP)
    assert not psutil.pid_exists(guard.pid)
