"""Executes another program such that the kernel kills it when its launcher dies.

    python -I -S die_with_launcher.py LAUNCHER_ID PROGRAM ARGUMENT...

This is a program, not code between fork and exec, because such code is unsafe if the launcher has threads.
It imports the standard library only, because it runs before every process of a cluster.
"""

import ctypes
import os
import signal
import sys

# From <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
# Exit codes as a shell uses them. Nothing reads _LAUNCHER_DIED: the launcher, which would read it, is dead.
_CANNOT_EXECUTE, _NOT_FOUND, _LAUNCHER_DIED = 126, 127, 128 + signal.SIGKILL


def main(launcher: int, command: list[str]) -> int:
    """Replaces this process by the command; returns a shell's exit code if the command can't be executed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        return _LAUNCHER_DIED
    # Python ignores these signals, and the next program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_EXECUTE


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
