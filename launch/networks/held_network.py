"""A private network for some of the processes that this one starts; this one stays in its own network.

    with private_network() as network:
        subprocess.run([*network.inside, "ip", "link"])         lists the loopback interface only

A small process that runs this module enters the network and holds it until its input ends. So it ends when its
parent dies.
"""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import select
import subprocess
import sys
from collections.abc import Iterator

from launch.networks.private_network import enter_private_network
from launch.supervision.own_program import own_program
from towers.errors import UserError

_ENTER_NETWORK = str(pathlib.Path(__file__).with_name("enter_network.py"))
_READY = "ready"
# The holder takes a fraction of a second to start and to end, unless a signal (SIGSTOP) has stopped it.
_LIMIT_SECONDS = 10
# From <sys/prctl.h>.
_PR_SET_DUMPABLE = 4


@dataclasses.dataclass(frozen=True)
class PrivateNetwork:
    """A private network, or the reason why there is none.

    Attributes:
      inside: words to put before a command to run it in the network; () if there is no network.
      problem: why there is no network; '' if there is one.
    """

    inside: tuple[str, ...] = ()
    problem: str = ""


@contextlib.contextmanager
def private_network() -> Iterator[PrivateNetwork]:
    """Context manager: a network that has only a loopback interface, if the system permits one."""
    with _holder() as holder:
        has_answered = select.select([holder.stdout], [], [], _LIMIT_SECONDS)[0]
        said = holder.stdout.readline().strip() if has_answered else f"no answer for {_LIMIT_SECONDS} seconds"
        if said == _READY:
            yield PrivateNetwork(inside=(sys.executable, "-I", "-S", _ENTER_NETWORK, str(holder.pid)))
        else:
            yield PrivateNetwork(problem=said or "its process ended without a message")


@contextlib.contextmanager
def _holder() -> Iterator[subprocess.Popen]:
    """Context manager: the process that holds the network. It ends with this context, even if it is stopped."""
    command, variables = own_program("launch.networks.held_network")
    holder = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
        text=True,
        # Ctrl-C in the terminal must not end it before the processes in the network.
        start_new_session=True,
    )
    try:
        yield holder
    finally:
        with contextlib.suppress(OSError):
            holder.stdin.close()
        try:
            holder.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()
        holder.stdout.close()


def main() -> None:
    """Enters a private network and prints that, or why it can't; waits until its input ends."""
    try:
        enter_private_network()
        # A new user namespace makes a process undumpable, which keeps other processes of its user from entering.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        print(_READY, flush=True)
    except (OSError, UserError) as error:
        print(getattr(error, "strerror", None) or error, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
