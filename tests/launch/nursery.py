"""Starts `python ...` at once, as a fork of a process that has imported everything and computed nothing.

That process is in a private network: TensorFlow's server listens on every interface, also to other machines.
"""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from launch.networks.held_network import private_network
from tests.launch.programs import Ended, ended, environment
from tests.launch.system_networks import permits_private_network

# Reads one request a line: to start a program, which returns its process id; or, for a process id, to return the
# exit code, null while the process runs.
_PROGRAM = """
import gc, json, os, runpy, sys
import launch.train
import models.own_task
import tensorboard.summary.v2
from models.data.shapes import drawn
from tests.launch.forked_child import become

def run(words, environment):
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")

def reply(request):
    if "pid" in request:
        pid, status = os.waitpid(request["pid"], os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None
    return os.fork() or become(lambda: run(request["words"], request["environment"]), **request["process"])

# Most programs train on it, and take a second to draw it.
drawn()
# Collections in a fork would write to all these objects, and so copy them: a seventh of a short program's time.
gc.collect()
gc.freeze()
while line := sys.stdin.readline():
    os.write(1, json.dumps(reply(json.loads(line))).encode() + b"\\n")
"""


class Nursery:
    """A process that has imported TensorFlow and this project; each program is a fork of it.

    Attributes:
      inside: the words to put before a command, so that it runs in the network of these programs.
    """

    def __init__(self, **variables: str):
        """Args:
        variables: variables added to the environment in which the process starts.
        """
        self._network = contextlib.ExitStack()
        network = self._network.enter_context(private_network())
        self.inside = network.inside
        assert self.inside or not permits_private_network(), f"no private network: {network.problem}"
        self._process = subprocess.Popen(
            [*self.inside, sys.executable, "-c", _PROGRAM],
            env=environment() | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(
        self,
        words: Sequence[str],
        *,
        cwd: pathlib.Path | None,
        env: Mapping[str, str],
        files: Sequence[str],
        network: str | None = None,
    ) -> "Forked":
        """Starts `python words...`; its standard output and standard error are appended to two files.

        Args:
          words: the words after `python`.
          cwd: the current folder; None for this process's.
          env: the environment.
          files: the files for standard output and standard error.
          network: file of the network namespace that it runs in; None for this process's.
        """
        process = {"cwd": str(cwd or pathlib.Path.cwd()), "out": files[0], "err": files[1], "network": network}
        return Forked(self, self.ask(words=list(words), environment=dict(env), process=process), files)

    def ask(self, **request):
        """Sends a request to the process, see `_PROGRAM`, and returns the reply."""
        self._process.stdin.write(json.dumps(request) + "\n")
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Kills this process; the programs that it started go on."""
        self._process.kill()
        self._process.communicate(timeout=20)
        self._network.close()


@functools.cache
def nursery() -> Nursery:
    """The nursery of this test process; it is closed when the test process ends."""
    made = Nursery()
    atexit.register(made.close)
    return made


class Forked:
    """A program that a nursery started, with the methods of subprocess.Popen that tests use."""

    stdout = None

    def __init__(self, nursery: Nursery, pid: int, files: Sequence[str]):
        self._nursery, self.pid, self.returncode, self._files = nursery, pid, None, files

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask(pid=self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Waits for the end; returns standard output and standard error."""
        self.wait(timeout)
        out, err = (pathlib.Path(path).read_text(errors="replace") for path in self._files)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def forked(*command: str, cwd: pathlib.Path) -> Iterator[Forked]:
    """Context manager: as programs.started, without the seconds of the imports."""
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("out", "err")]
        process = nursery().start(command, cwd=cwd, env=environment(), files=files)
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=20)


def run_forked(*command: str, cwd: pathlib.Path) -> Ended:
    """As programs.run, without the seconds of the imports."""
    with forked(*command, cwd=cwd) as process:
        return ended(process)
