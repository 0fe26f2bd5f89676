"""TCP's keepalive, by which a silent machine is detected although nothing is sent to it."""

import socket

# About 30 seconds: 10 + 4 * 5.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def keep_alive(connection: socket.socket) -> None:
    """From now on, the connection breaks if the other machine is silent for about 30 seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
