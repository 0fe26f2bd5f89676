"""The guard kills its process if that is stopped for too long."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from launch.supervision import standstill_guard
from tests.launch.programs import ROOT

PROGRAM = """
import sys, time
from launch.supervision.standstill_guard import StandstillGuard
with StandstillGuard(float(sys.argv[1]), "worker:1 stood still"):
    print("ready", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def guarded(limit_seconds):
    command = (sys.executable, "-c", PROGRAM, str(limit_seconds))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        # The end of standard error shows that the guard has ended.
        process.communicate(timeout=20)


@pytest.mark.full
def test_a_stopped_process_is_killed_with_one_line():
    with guarded(0.4) as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait(20) == -signal.SIGKILL
        assert process.stderr.read() == "worker:1 stood still\n"


@pytest.mark.full
def test_a_process_that_continues_in_time_lives():
    with guarded(2) as process:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(2)
        assert process.poll() is None


def test_a_stranger_that_has_the_number_of_a_dead_parent_lives():
    """The guard may outlive its parent: a forked child of the parent can keep its standard input open."""
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep) as stranger, subprocess.Popen(sleep, stdout=subprocess.PIPE) as waits:
        try:
            os.kill(stranger.pid, signal.SIGSTOP)
            command = (sys.executable, "-I", "-S", standstill_guard.__file__, str(stranger.pid), "0.2", "killed")
            guard = subprocess.run(command, stdin=waits.stdout, capture_output=True, timeout=20, check=False)
            assert (guard.returncode, guard.stderr) == (0, b"")
            assert stranger.poll() is None
        finally:
            stranger.kill()
            waits.kill()
