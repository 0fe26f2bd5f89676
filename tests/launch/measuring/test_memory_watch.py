"""The memory of a process and of those that it starts."""

import subprocess
import sys

import pytest

from launch.measuring import memory_watch
from launch.measuring.memory_watch import MemoryWatch

MIB = 2**20
# Holds 200 MiB and forks a child, which holds as much.
PROGRAM = """
import os, sys, time
held = bytearray(b"x") * (200 * 2**20)
child = os.fork()
time.sleep(float(sys.argv[1]))
if child:
    os.waitpid(child, 0)
"""


@pytest.mark.full
@pytest.mark.parametrize("seconds, young_seconds, counted", [(0.6, 30.0, 1), (2.5, 1.0, 2)])
def test_what_was_just_forked_does_not_count(monkeypatch, seconds, young_seconds, counted):
    """A fork may be about to run another program, as `uname`. On a busy machine 0.6 s may take more than 1 s."""
    monkeypatch.setattr(memory_watch, "_FORK_SECONDS", young_seconds)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(seconds)])
    with process, MemoryWatch([process.pid]) as watch:
        assert process.wait(30) == 0
    assert 200 * counted * MIB < watch.peak_bytes < (200 * counted + 100) * MIB
