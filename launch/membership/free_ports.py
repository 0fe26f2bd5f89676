"""Ports of this machine that nobody listens on."""

import contextlib
import pathlib
import random
import socket

LOOPBACK = "127.0.0.1"
_RANGE_FILE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10000
_ANY_PORT = 0
# Two programs whose seed is the same must not be given the same ports.
_DRAW = random.SystemRandom()


def free_addresses(count: int) -> list[str]:
    """Different '127.0.0.1:port' that were free a moment ago.

    They lie below the ports that the kernel lends to outgoing connections: there, a process that tries to reach a
    peer before it listens may be lent the peer's very port, and meets itself.
    """
    wanted = _DRAW.sample(range(_LOWEST_PORT, _first_lent_port()), k=_first_lent_port() - _LOWEST_PORT)
    with contextlib.ExitStack() as held:
        # Each is held until all are found, so that none is found twice.
        found = [held.enter_context(_bound(wanted)) for _ in range(count)]
        return [f"{LOOPBACK}:{listener.getsockname()[1]}" for listener in found]


def _bound(ports: list[int]) -> socket.socket:
    """A socket on the last of the ports that is free, taken from the list; on any port when the list is empty."""
    while True:
        candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            candidate.bind((LOOPBACK, ports.pop() if ports else _ANY_PORT))
            return candidate
        except OSError:
            candidate.close()


def _first_lent_port() -> int:
    """The lowest port that the kernel lends; none stays for us where it lends nearly all, or says nothing."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return max(_LOWEST_PORT, int(_RANGE_FILE.read_text().split()[0]))
    return _LOWEST_PORT
