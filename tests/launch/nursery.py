"""`python ...` without the seconds of its imports: forks of one that has imported all and computed nothing."""

import atexit
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tests.launch.programs import environment

# A question a line: what to start, answered by the process id, or whose exit code is wanted, if it has one.
_PROGRAM = """
import json, os, runpy, sys, traceback
import launch.train

def become(call):
    code = 1
    try:
        live(call)
        code = 0
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException:
        traceback.print_exc()
    # TensorFlow takes a second to tidy up.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

def live(call):
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    for stream, name in enumerate(call["files"], start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(call["cwd"])
    os.environ.clear()
    os.environ.update(call["environment"])
    first, *rest = call["words"]
    sys.stdin = open(0)
    if first == "-m":
        sys.argv = rest
        sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = call["words"]
        runpy.run_path(first, run_name="__main__")

def answer(call):
    if "pid" in call:
        pid, status = os.waitpid(call["pid"], os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None
    return os.fork() or become(call)

while line := sys.stdin.readline():
    os.write(1, json.dumps(answer(json.loads(line))).encode() + b"\\n")
"""


class Nursery:
    """Starts programs that use this package at once."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(
        self, words: Sequence[str], *, cwd: pathlib.Path | None, env: Mapping[str, str], files: Sequence[str]
    ) -> "Forked":
        """As `python words...`; what it writes is appended to two files."""
        where = str(cwd or pathlib.Path.cwd())
        pid = self.ask(words=list(words), cwd=where, environment=dict(env), files=list(files))
        return Forked(self, pid)

    def ask(self, **question):
        self._process.stdin.write(json.dumps(question) + "\n")
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends it; what it started stays."""
        self._process.kill()
        self._process.communicate(timeout=20)


@functools.cache
def nursery() -> Nursery:
    """The one of this process, for as long as that runs."""
    made = Nursery()
    atexit.register(made.close)
    return made


class Forked:
    """One that was started, as subprocess.Popen."""

    stdout = None

    def __init__(self, nursery: Nursery, pid: int):
        self._nursery, self.pid, self.returncode = nursery, pid, None

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

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
