"""Clusters of small programs under `python -m launch.local`: no TensorFlow in them, and none is left behind."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import psutil

from tests.launch.programs import LIMIT_SECONDS, Ended, ended, environment

_MARK = "TOWERS_TEST_MARK"
PROGRAM = ("python", "program.py")

# What every program begins with: `name` is its own, `here` a folder that all of them share.
_BEGINNING = """
import json, os, pathlib, signal, subprocess, sys, time

config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
name = f"{role}:{index}"
here = pathlib.Path(__file__).parent

def until(happened):
    deadline = time.monotonic() + 60
    while not happened():
        if time.monotonic() > deadline:
            sys.exit("it did not happen in a minute")
        time.sleep(0.01)

def mark(what):
    (here / what).touch()

def until_marked(*names):
    until(lambda: all((here / name).exists() for name in names))
"""


@dataclasses.dataclass(frozen=True)
class Launched:
    """A launcher that runs.

    Attributes:
      process: the launcher's own.
      folder: the current one of all its processes, with program.py in it.
      mark: stands in the environment of all of them.
    """

    process: subprocess.Popen
    folder: pathlib.Path
    mark: str

    def ended(self) -> Ended:
        """Waits for its end."""
        return ended(self.process)

    def wait_for(self, *names: str) -> None:
        """Until the programs have marked these."""
        wait_until(lambda: all((self.folder / name).exists() for name in names))

    def left(self) -> list[psutil.Process]:
        """What still runs of it, the launcher and its guard included."""
        return _marked(self.mark)

    def log(self, name: str) -> str:
        """The log of 'worker:1'."""
        [path] = self.folder.glob(f"runs/*/logs/{name.replace(':', '-')}.log")
        return path.read_text()


@functools.cache
def network_flags() -> tuple[str, ...]:
    """For the launcher, where it is refused a network of its own: it would say so."""
    trial = "from launch.supervision.private_network import enter_private_network; enter_private_network()"
    refused = subprocess.run([sys.executable, "-c", trial], env=environment(), capture_output=True).returncode != 0
    return ("--noprivate_network",) if refused else ()


@contextlib.contextmanager
def launched(folder: pathlib.Path, program: str, *flags: str, command=PROGRAM) -> Iterator[Launched]:
    """Within, `python -m launch.local FLAGS -- python program.py` runs; afterwards nothing of it may be left."""
    (folder / "program.py").write_text(_BEGINNING + program)
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.local", *network_flags(), *flags, "--", *command],
        cwd=folder,
        # A launcher's own fault would not be its processes'.
        env=environment() | {_MARK: mark, "TOWERS_FAULT": "kill@0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        print("nothing that a process of the cluster should read", file=process.stdin, flush=True)
        yield Launched(process, folder, mark)
        wait_until(lambda: not _marked(mark), seconds=20)
    finally:
        for left in _marked(mark):
            left.kill()
        process.communicate(timeout=20)


def run_cluster(folder: pathlib.Path, program: str, *flags: str, **options) -> Ended:
    """A cluster from beginning to end."""
    with launched(folder, program, *flags, **options) as cluster:
        return cluster.ended()


def wait_until(happened: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> None:
    """Until it happens, or fails."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen in {seconds} seconds"
        time.sleep(0.01)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(_MARK) == mark:
                found.append(process)
    return found
