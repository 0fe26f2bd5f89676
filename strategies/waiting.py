"""Waiting at the start until all processes of a cluster listen on their addresses."""

import socket
import time
from collections.abc import Sequence

from strategies.cluster import Member
from strategies.errors import PeerLost
from towers.errors import UserError

_PROBE_SECONDS = 0.2


def wait_for_all(this: Member, others: Sequence[Member], timeout_seconds: float) -> None:
    """Listens on this member's address until every other member listens on its own.

    Raises:
      UserError: this member's address is in use.
      PeerLost: some members did not start in time; the message names them.
    """
    missing, deadline = list(others), time.monotonic() + timeout_seconds
    with listening(this):
        while missing := [member for member in missing if not listens(member.address)]:
            left = deadline - time.monotonic()
            if left <= 0:
                named = ", ".join(f"{member.name} ({member.address})" for member in missing)
                raise PeerLost(
                    f"{named} did not start within startup_timeout_seconds={timeout_seconds:g}: "
                    "start it, or correct its address in TF_CONFIG"
                )
            time.sleep(min(_PROBE_SECONDS, left))


def listening(member: Member) -> socket.socket:
    """A socket that listens where the member's server will. The kernel accepts connections to it.

    Raises:
      UserError: it cannot listen there, usually because another program does.
    """
    listener = socket.socket(member.family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # On every interface, like TensorFlow's server, which ignores the host in the address.
        listener.bind(("", member.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(
            f"{member.name}: cannot listen on port {member.port} of {member.address} ({error.strerror}); "
            "end the program that uses it, or choose another port for all workers"
        ) from error
    return listener


def listens(address: str, timeout_seconds: float = 0.3) -> bool:
    """Whether 'host:port' accepts a TCP connection."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds):
            return True
    except OSError:
        return False
