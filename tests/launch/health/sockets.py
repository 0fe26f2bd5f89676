"""Real ports of this machine: listening, silent and closed."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def listening() -> Iterator[int]:
    """Context manager: the port of a server that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """Context manager: the port of a server whose queue is full, so that Linux drops packets as a firewall does.

    A remote address would not work: some networks answer for every address.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def closed() -> int:
    """A port that nothing listens on."""
    with listening() as port:
        return port
