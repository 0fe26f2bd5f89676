"""Becomes another program that the kernel kills when its launcher dies.

    python -I -S tied_start.py LAUNCHER_ID PROGRAM ARGUMENT...

A process of its own rather than code between fork and exec, which is unsafe where the launcher has threads.
It imports nothing but the standard library: it stands before every start.
"""

import ctypes
import os
import signal
import sys

# Of <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
# As a shell has them; nobody is left to read the last.
_CANNOT_EXECUTE, _NOT_FOUND, _LAUNCHER_DIED = 126, 127, 128 + signal.SIGKILL


def main(launcher: int, command: list[str]) -> int:
    """Replaces this process by the command; gives a shell's exit code if it can't be run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        return _LAUNCHER_DIED
    # Python ignores these, and what is ignored stays so in the next program.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_EXECUTE


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
