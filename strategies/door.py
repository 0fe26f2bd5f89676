"""Finds a connection to a listening socket that begins with certain bytes, without waiting for any of them."""

import errno
import secrets
import selectors
import socket
import time

# Largest number of connections that have not sent the bytes; one more closes the oldest.
_MOST_STRANGERS = 128
# Errors if this process or the machine can't open another connection, which stays in the queue.
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_RETRY_SECONDS = 0.1


class Door:
    """Context manager: reads from all connections at once, and closes those that are not let in."""

    def __init__(self, listener: socket.socket, expected: bytes, *, greeting: bytes = b""):
        """Args:
        listener: a listening socket; this object does not close it.
        expected: the bytes that a connection must send first.
        greeting: bytes that every connection is sent at once.
        """
        self._listener, self._expected, self._greeting = listener, expected, greeting
        # The bytes that each connection has sent so far, the oldest connection first.
        self._sent: dict[socket.socket, bytes] = {}
        self._ready = selectors.DefaultSelector()

    def __enter__(self) -> "Door":
        self._listener.setblocking(False)
        self._ready.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_) -> None:
        for connection in list(self._sent):
            self._turn_away(connection)
        self._ready.close()

    def let_in(self, seconds: float) -> socket.socket | None:
        """Waits until something arrives; returns a connection that has sent the expected bytes, or None."""
        for key, _ in self._ready.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif self._knows(key.fileobj):
                self._ready.unregister(key.fileobj)
                del self._sent[key.fileobj]
                return key.fileobj
        return None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._sent[connection] = b""
            self._ready.register(connection, selectors.EVENT_READ)
            connection.send(self._greeting)
        except OSError as error:
            # A client that has already closed the connection does not count.
            if error.errno in _NO_ROOM:
                self._make_room()
        if len(self._sent) > _MOST_STRANGERS:
            self._make_room()

    def _make_room(self) -> None:
        """Closes the oldest unknown connection. Without one, waits a moment: the queue stays readable."""
        if self._sent:
            self._turn_away(next(iter(self._sent)))
        else:
            time.sleep(_RETRY_SECONDS)

    def _knows(self, connection: socket.socket) -> bool:
        if connection not in self._sent:
            return False  # turned away in this round
        try:
            more = connection.recv(len(self._expected) - len(self._sent[connection]))
        except BlockingIOError:
            return False
        except OSError:
            more = b""
        self._sent[connection] += more
        is_complete = len(self._sent[connection]) == len(self._expected)
        if is_complete and secrets.compare_digest(self._sent[connection], self._expected):
            return True
        if is_complete or not more:
            self._turn_away(connection)
        return False

    def _turn_away(self, connection: socket.socket) -> None:
        del self._sent[connection]
        self._ready.unregister(connection)
        connection.close()
