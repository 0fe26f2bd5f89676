"""Real ports of this machine in the states that a peer's may be in."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def listening() -> Iterator[int]:
    """The port of a server that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """The port of a server whose queue is full: Linux then drops whoever knocks, as a firewall would.

    No address far away would do: some networks answer for all of them.
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
