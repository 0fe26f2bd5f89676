"""Whether an address answers, and if not, how it fails to."""

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
    """How an attempt to connect ended.

    Attributes:
      state: REACHED; REFUSED: the machine answers, and nothing listens there; SILENT: nothing came back in time;
        UNKNOWN_NAME: the host's name leads to no address; UNREACHABLE: this machine knows no way there.
      seconds: how long that took.
      reason: the system's own words, if any.
    """

    state: str
    seconds: float
    reason: str = ""


def reach_all(addresses: Sequence[str], *, timeout_seconds: float) -> list[Reach]:
    """Connects to each 'host:port', all at once, and closes again; nothing is sent.

    Takes a second more than the timeout at most, whatever the name server does.
    """
    # Until its thread says otherwise: a name server's silence knows no timeout, so nobody waits for the thread.
    unanswered = Reach(state=UNKNOWN_NAME, seconds=timeout_seconds, reason="the name server does not answer")
    found = [unanswered] * len(addresses)

    def attempt(place: int, address: str) -> None:
        found[place] = reach(address, timeout_seconds=timeout_seconds)

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
    """Connects to 'host:port' or '[host]:port'; the name server's own time comes on top of the timeout."""
    host, _, port = address.rpartition(":")
    begun = time.monotonic()
    try:
        targets = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return Reach(state=UNKNOWN_NAME, seconds=time.monotonic() - begun, reason=error.strerror)
    except UnicodeError:
        return Reach(state=UNKNOWN_NAME, seconds=time.monotonic() - begun, reason="no host can have it")
    ends = [_connect(target, timeout_seconds / len(targets)) for target in targets]
    # A name may lead to several addresses, and one that answers is enough.
    order = (REACHED, REFUSED, SILENT, UNREACHABLE)
    state, reason = min(ends, key=lambda end: order.index(end[0]))
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


def is_port_free(port: int) -> bool:
    """Whether a server could listen on it here.

    Raises:
      OSError: for another reason than one that listens there already, as the lack of a right.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        # Else the remains of a server that has just ended would look like one.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
