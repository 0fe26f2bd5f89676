"""Several threads in a test, and connections between them."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from strategies.servers.wire import Connection

LIMIT_SECONDS = 30
# A thread that waits this long was not woken.
TOO_LONG = 10 * LIMIT_SECONDS


class Started:
    """A call that runs in its own thread."""

    def __init__(self, act: Callable[[], object]):
        self._act, self._found, self._raised = act, None, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._act()
        except BaseException as error:  # `result` raises it again
            self._raised = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self):
        """What the call returned; raises what it raised."""
        self._thread.join(LIMIT_SECONDS)
        assert not self.is_running, f"it still runs after {LIMIT_SECONDS} seconds"
        if self._raised is not None:
            raise self._raised
        return self._found


def at_once(*acts: Callable[[], object]) -> list:
    """The results of several calls that run at the same time."""
    return [started.result() for started in [Started(act) for act in acts]]


@contextlib.contextmanager
def loopback() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begins = socket.create_connection(listener.getsockname())
        with begins, listener.accept()[0] as other:
            yield begins, other


@contextlib.contextmanager
def connections(timeout_seconds: float = LIMIT_SECONDS) -> Iterator[tuple[Connection, Connection]]:
    """The two ends of a connection for messages; both sides are let in."""
    with loopback() as ends:
        yield tuple(let_in(end, timeout_seconds) for end in ends)


def let_in(end: socket.socket, timeout_seconds: float = LIMIT_SECONDS) -> Connection:
    """A connection whose other side is let in."""
    connection = Connection(end, timeout_seconds)
    connection.let_in(timeout_seconds)
    return connection
