"""A small process that kills its parent if a signal (SIGSTOP) has stopped it for too long.

A stopped process keeps its connections, so TensorFlow waits for it without end: before an eager operation a chief
may send a function to all workers. (Cutting the chief's connection was not enough: the next such call connects
again and holds Python's lock for up to 20 seconds.) Once the process is killed, the others notice its loss. The
guard runs as a file, without this package: it imports the standard library only. Without /proc (macOS) it does
nothing.
"""

import contextlib
import os
import pathlib
import select
import signal
import subprocess
import sys

_LOOKS = 8
_LONGEST_PAUSE_SECONDS = 1.0
_LIMIT_SECONDS = 10
_STOPPED = "T"


class StandstillGuard:
    """Context manager: while active, this process is killed if it has been stopped for `limit_seconds`."""

    def __init__(self, limit_seconds: float, why: str):
        """Args:
        limit_seconds: seconds that the process may be stopped.
        why: the line to print on standard error before the kill.
        """
        self._arguments = str(os.getpid()), str(limit_seconds), why

    def __enter__(self) -> "StandstillGuard":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *self._arguments],
            # The guard ends when this pipe closes: with this process, or with this context.
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # A signal to this process's group, such as that of Ctrl-Z, does not stop the guard.
            start_new_session=True,
            cwd="/",
        )
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            # A signal has stopped the guard too.
            self._process.kill()
            self._process.wait()


def watch(process: int, limit_seconds: float, why: str) -> None:
    """Kills the parent `process` once it has been stopped for `limit_seconds`; returns then, or when stdin ends.

    Stdin stays open while any process that the parent forked lives. So the guard also returns when its parent has
    died: the system may give the parent's number to another process.

    The guard adds up its checks that found the parent stopped, not elapsed time: when Slurm suspends a job, the
    guard is stopped too, and the parent must not be killed afterwards.
    """
    pause = min(_LONGEST_PAUSE_SECONDS, limit_seconds / _LOOKS)
    stopped_seconds = 0.0
    while not select.select([sys.stdin], [], [], pause)[0]:
        if os.getppid() != process:
            return
        stopped_seconds = stopped_seconds + pause if _is_stopped(process) else 0.0
        if stopped_seconds >= limit_seconds:
            print(why, file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            return


def _is_stopped(process: int) -> bool:
    try:
        text = pathlib.Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return False
    # The state follows the name, which is in parentheses and may contain parentheses.
    return text.rpartition(")")[2].split()[0] == _STOPPED


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
