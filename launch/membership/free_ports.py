"""Free ports on this machine, for clusters of processes."""

import contextlib
import pathlib
import random
import socket

from towers.errors import UserError

LOOPBACK = "127.0.0.1"
_RANGE_FILE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10000
_ANY_PORT = 0
_ALL_ADDRESSES = ""
# Not random's global generator: two programs with the same seed must get different ports.
_DRAW = random.SystemRandom()


def free_addresses(count: int) -> list[str]:
    """`count` different addresses '127.0.0.1:port' whose ports are free now, on all of this machine's addresses.

    TensorFlow's server listens on all addresses.

    The ports lie below the kernel's range for outgoing connections. With a port in that range, a process that
    connects to a peer before the peer listens may be assigned the peer's port and connect to itself.

    Raises:
      UserError: the system lets this process listen on no port.
    """
    candidates = _DRAW.sample(range(_LOWEST_PORT, _first_outgoing_port()), k=_first_outgoing_port() - _LOWEST_PORT)
    with contextlib.ExitStack() as bound:
        # All sockets stay bound until the last port is found, so that no port is found twice.
        found = [bound.enter_context(_bound(candidates)) for _ in range(count)]
        return [f"{LOOPBACK}:{listener.getsockname()[1]}" for listener in found]


def _bound(ports: list[int]) -> socket.socket:
    """A socket bound to the last free port of the list, or to any free port once the list is empty."""
    while True:
        candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        port = ports.pop() if ports else _ANY_PORT
        try:
            candidate.bind((_ALL_ADDRESSES, port))
            return candidate
        except OSError as error:
            candidate.close()
            if port == _ANY_PORT:
                raise UserError(
                    f"this process may listen on no port ({error.strerror}), but the processes of a cluster "
                    "connect to each other: run it where sockets are allowed"
                ) from error


def _first_outgoing_port() -> int:
    """Lowest port of the kernel's range for outgoing connections; _LOWEST_PORT if it is lower or unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return max(_LOWEST_PORT, int(_RANGE_FILE.read_text().split()[0]))
    return _LOWEST_PORT
