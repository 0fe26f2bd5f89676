"""A server's listening port: checks that it may be used, and accepts connections until it is closed."""

import contextlib
import socket
import time
from collections.abc import Callable

from strategies.cluster import Member
from towers.errors import UserError

_RETRY_SECONDS = 0.2


class Listener:
    """Listens from its construction to `close`."""

    def __init__(self, member: Member, *, for_other_machines: bool = True):
        """Args:
        member: this process.
        for_other_machines: whether other machines may connect if the member's name has a loopback address here.

        Raises:
          UserError: the port is taken, or this process may not listen on it.
        """
        self._socket = _listening(member, member.listening_host if for_other_machines else member.host)

    def accept_all(self, serve: Callable[[socket.socket], None]) -> None:
        """Calls `serve` with each connection until `close`. `serve` may fail for lack of threads or memory."""
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                # The client has closed the connection already, or too many connections are open for now.
                time.sleep(_RETRY_SECONDS)
                continue
            try:
                serve(accepted)
            except (RuntimeError, MemoryError, OSError):
                # No thread or memory for this connection now; the client tries again.
                accepted.close()
                time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Stops listening. Further calls do nothing."""
        # A thread that waits in accept holds the port until the shutdown wakes it.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _listening(member: Member, host: str) -> socket.socket:
    """Listens on one of the member's addresses if this machine has it, else on all addresses of the machine."""
    try:
        return socket.create_server((host, member.port), family=member.family)
    except PermissionError as error:
        raise UserError(
            f"{member.name} can't listen on {member.address} ({error.strerror}): give it a port above 1023"
        ) from error
    except OSError as first:
        try:
            return socket.create_server(("", member.port), family=member.family)
        except OSError as error:
            raise UserError(
                f"{member.name} can't listen on {member.address} ({error.strerror or first.strerror}): "
                "end the process that uses the port, or give this member another port"
            ) from error
