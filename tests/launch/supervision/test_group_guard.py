"""The guard kills the groups that began and did not end."""

import os
import signal
import subprocess
import sys

import pytest

from launch.supervision.group_guard import GroupGuard, kill_what_is_left

SLEEP = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)")


@pytest.fixture
def groups():
    started = [subprocess.Popen(SLEEP, start_new_session=True) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_those_that_ended_are_let_be(groups):
    left, ended = groups
    kill_what_is_left([f"begins {left.pid}\n", f"begins {ended.pid}\n", f"ended {ended.pid}\n"])
    assert left.wait(20) == -signal.SIGKILL
    assert ended.poll() is None


def test_a_group_that_is_gone():
    gone = subprocess.Popen((sys.executable, "-I", "-S", "-c", ""), start_new_session=True)
    gone.wait()
    kill_what_is_left([f"begins {gone.pid}\n"])


def test_it_kills_at_the_end(groups):
    left, ended = groups
    with GroupGuard() as guard:
        guard.watch(left.pid)
        guard.watch(ended.pid)
        guard.forget(ended.pid)
        assert left.poll() is None
    assert left.wait(20) == -signal.SIGKILL
    assert ended.poll() is None


def test_a_guard_that_was_killed_is_no_fault(groups):
    with GroupGuard() as guard:
        os.kill(guard.pid, signal.SIGKILL)
        for _ in range(100):
            guard.watch(groups[0].pid)
    assert groups[0].poll() is None
