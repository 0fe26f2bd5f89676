"""Runs a program in a fork of a process that has imported it: no time is spent on imports."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from launch.networks.network_namespaces import enter


def become(
    program: Callable[[], None],
    *,
    cwd: str,
    out: str,
    err: str,
    limit_seconds: int = 0,
    network: str | None = None,
) -> NoReturn:
    """Runs `program` in this forked child and ends the child with the exit code that Python would give.

    Args:
      program: the program; it may raise SystemExit.
      cwd: the current folder of the program.
      out, err: the files to which its standard output and standard error are appended.
      limit_seconds: seconds until SIGALRM ends it; 0 for no limit.
      network: file of the network namespace that it runs in; None for this process's.
    """
    code = 1
    try:
        signal.alarm(limit_seconds)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0)
        for stream, name in ((1, out), (2, err)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.chdir(cwd)
        if network is not None:
            enter(network)
        program()
        code = 0
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException:
        traceback.print_exc()
    # TensorFlow takes a second to release its resources at a regular exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
