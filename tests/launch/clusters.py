"""Clusters of small programs without TensorFlow under `python -m launch.local`; no process is left behind."""

import array
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator

import psutil

from tests.launch.programs import LIMIT_SECONDS, Ended, ended, environment
from tests.launch.system_networks import permits_private_network

_MARK = "TOWERS_TEST_MARK"
PROGRAM = ("python", "program.py")

# The beginning of every program: `name` is its process, `here` a folder that all processes share.
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
            sys.exit("the condition did not become true in 60 seconds")
        time.sleep(0.01)

def mark(what):
    (here / what).touch()

def until_marked(*names):
    until(lambda: all((here / name).exists() for name in names))
"""


@dataclasses.dataclass(frozen=True)
class Launched:
    """A running launcher.

    Attributes:
      process: the launcher's process.
      folder: the current folder of all its processes, which holds program.py.
      mark: a text in the environment of all its processes.
    """

    process: subprocess.Popen
    folder: pathlib.Path
    mark: str

    def ended(self) -> Ended:
        """Waits until the launcher has ended."""
        return ended(self.process)

    def wait_for(self, *names: str) -> None:
        """Waits until the programs have called `mark` with these names."""
        wait_until(lambda: all((self.folder / name).exists() for name in names))

    def left(self) -> list[psutil.Process]:
        """The processes that still run, including the launcher and its guard."""
        return _marked(self.mark)

    def log(self, name: str) -> str:
        """The log of 'worker:1'."""
        [path] = self.folder.glob(f"runs/*/logs/{name.replace(':', '-')}.log")
        return path.read_text()


def network_flags() -> tuple[str, ...]:
    """--noprivate_network where the system permits no private network, so that the launcher prints no warning."""
    return () if permits_private_network() else ("--noprivate_network",)


@contextlib.contextmanager
def launched(folder: pathlib.Path, program: str, *flags: str, command=PROGRAM) -> Iterator[Launched]:
    """Context manager: runs `python -m launch.local FLAGS -- python program.py`; fails if a process is left."""
    (folder / "program.py").write_text(_BEGINNING + program)
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.local", *network_flags(), *flags, "--", *command],
        cwd=folder,
        # The launcher must not pass its own TOWERS_FAULT on.
        env=environment() | {_MARK: mark, "TOWERS_FAULT": "kill@0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        print("no process of the cluster should read this", file=process.stdin, flush=True)
        yield Launched(process, folder, mark)
        wait_until(lambda: not _marked(mark), seconds=20)
    finally:
        for left in _marked(mark):
            left.kill()
        process.communicate(timeout=20)


def run_cluster(folder: pathlib.Path, program: str, *flags: str, **options) -> Ended:
    """Runs a cluster to its end."""
    with launched(folder, program, *flags, **options) as cluster:
        return cluster.ended()


def wait_until(happened: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> None:
    """Waits until `happened` returns True; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"the condition did not become true in {seconds} seconds"
        time.sleep(0.01)


def wait_until_full(pipe: int) -> None:
    """Waits until the pipe with this read end is full: its writer waits for the reader.

    Args:
      pipe: file descriptor of the read end.
    """
    unread, before = array.array("i", [0]), 0

    def is_full() -> bool:
        nonlocal before
        before = unread[0]
        time.sleep(0.3)
        fcntl.ioctl(pipe, termios.FIONREAD, unread)
        return unread[0] == before > 32_000

    wait_until(is_full)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(_MARK) == mark:
                found.append(process)
    return found
