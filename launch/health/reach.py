"""Tries to connect to addresses, and says how an attempt failed."""

import dataclasses
import errno
import socket
import threading
import time
from collections.abc import Sequence

REACHED, REFUSED, SILENT, UNKNOWN_NAME, UNREACHABLE = (
    "reached",
    "refused",
    "no answer",
    "unknown name",
    "unreachable",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """The result of an attempt to connect.

    Attributes:
      state: REACHED; REFUSED: the machine answers, but nothing listens on the port; SILENT: no answer before the
        timeout; UNKNOWN_NAME: the host name has no address; UNREACHABLE: there is no route to the host.
      seconds: duration of the attempt.
      reason: the operating system's error message, or ''.
    """

    state: str
    seconds: float
    reason: str = ""


def reach_all(addresses: Sequence[str], *, timeout_seconds: float) -> list[Reach]:
    """Connects to all 'host:port' concurrently and closes the connections; sends nothing.

    Returns at most one second after the timeout, even if the name server does not answer.
    """
    # The result until the address's thread replaces it. Resolving a name has no timeout, so nothing waits for a
    # thread beyond the deadline.
    unanswered = Reach(state=UNKNOWN_NAME, seconds=timeout_seconds, reason="the name server does not answer")
    found = [unanswered] * len(addresses)

    def attempt(index: int, address: str) -> None:
        found[index] = reach(address, timeout_seconds=timeout_seconds)

    attempts = [
        threading.Thread(target=attempt, args=arguments, daemon=True) for arguments in enumerate(addresses)
    ]
    for thread in attempts:
        thread.start()
    deadline = time.monotonic() + timeout_seconds + 1.0
    for thread in attempts:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(found)


def reach(address: str, *, timeout_seconds: float) -> Reach:
    """Connects to 'host:port' or '[host]:port'; the timeout does not include the time to resolve the name."""
    host, _, port = address.rpartition(":")
    begun = time.monotonic()
    try:
        targets = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return Reach(state=UNKNOWN_NAME, seconds=time.monotonic() - begun, reason=error.strerror)
    except UnicodeError:
        return Reach(state=UNKNOWN_NAME, seconds=time.monotonic() - begun, reason="not a valid host name")
    results = [_connect(target, timeout_seconds / len(targets)) for target in targets]
    # A name may have several addresses; one that answers is enough.
    order = (REACHED, REFUSED, SILENT, UNREACHABLE)
    state, reason = min(results, key=lambda result: order.index(result[0]))
    return Reach(state=state, seconds=time.monotonic() - begun, reason=reason)


def _connect(target: tuple, timeout_seconds: float) -> tuple[str, str]:
    """(state, reason) for one of getaddrinfo's answers."""
    family, kind, protocol, _, endpoint = target
    try:
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(timeout_seconds)
            connection.connect(endpoint)
            return REACHED, ""
    except ConnectionRefusedError:
        return REFUSED, ""
    except TimeoutError:
        return SILENT, ""
    except OSError as error:
        return UNREACHABLE, error.strerror or str(error)


def is_port_free(port: int, family: socket.AddressFamily = socket.AF_INET) -> bool:
    """Whether a server on this machine could listen on the port, on the addresses of this family.

    Raises:
      OSError: the port can't be used for a reason other than a server that uses it, e.g. missing permission.
    """
    with socket.socket(family, socket.SOCK_STREAM) as server:
        # Otherwise lingering connections of a server that has just ended would make the port look taken.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
