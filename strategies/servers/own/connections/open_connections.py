"""The connections of a server: to members of the run, and to strangers, which are not let in yet."""

import threading
from typing import NamedTuple

from strategies.cluster import Member
from strategies.servers.own.connections.stranger_limit import Strangers
from strategies.servers.wire import Connection


class Traffic(NamedTuple):
    """Bytes over all connections, including those that have ended."""

    sent_bytes: int
    received_bytes: int


class OpenConnections:
    """The connections that have not ended. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The member at the other side; None for a stranger.
        self._peers: dict[Connection, Member | None] = {}
        self._strangers = Strangers()
        self._ended = Traffic(0, 0)

    def add(self, connection: Connection) -> None:
        """Adds a stranger's connection; ends the oldest stranger's if there are too many."""
        self._strangers.add(connection)
        with self._lock:
            self._peers[connection] = None

    def let_in(self, connection: Connection, peer: Member) -> None:
        """Records that a stranger is a member."""
        self._strangers.remove(connection)
        with self._lock:
            self._peers[connection] = peer

    def remove(self, connection: Connection) -> None:
        """Removes a connection that has ended; its bytes still count."""
        self._strangers.remove(connection)
        with self._lock:
            del self._peers[connection]
            sent, received = self._ended
            self._ended = Traffic(sent + connection.sent_bytes, received + connection.received_bytes)

    def all(self) -> list[Connection]:
        with self._lock:
            return list(self._peers)

    def has_members(self) -> bool:
        with self._lock:
            return any(peer is not None for peer in self._peers.values())

    def traffic(self) -> Traffic:
        with self._lock:
            sent, received = self._ended
            return Traffic(
                sent + sum(connection.sent_bytes for connection in self._peers),
                received + sum(connection.received_bytes for connection in self._peers),
            )
