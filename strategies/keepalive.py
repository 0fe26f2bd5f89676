"""Detects a silent machine: by TCP's keepalive while nothing is sent to it, else by unanswered bytes.

Also detects a connection that the other side has closed.
"""

import select
import socket

# About 30 seconds: 10 + 4 * 5.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
# From <linux/tcp.h>: in `struct tcp_info`, two bytes count retransmissions and probes. Each answer resets them to
# 0.
_COUNTS = slice(2, 4)
# The pause before each retransmission is twice the previous one, and the first is at least 0.2 seconds: the
# seventh is sent after 25 seconds.
_MOST_UNANSWERED = 6


def keep_alive(connection: socket.socket) -> None:
    """Makes the connection break if the other machine is silent for about 30 seconds.

    The system sends no probes while sent bytes wait for an answer: see `is_unanswered`.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection, even if unread bytes remain."""
    poll = select.poll()
    # Only Linux reports the close while unread bytes remain.
    poll.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
    return bool(poll.poll(0))


def is_unanswered(connection: socket.socket) -> bool:
    """Whether sent bytes have been unacknowledged by the other machine for half a minute; on Linux only.

    Otherwise the system waits for 15 minutes. TCP_USER_TIMEOUT would shorten that, but it also breaks a connection
    whose other side is alive but does not read: a process that is suspended, or reads from another server first.

    Raises:
      OSError: the connection is closed.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    counts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.stop)[_COUNTS]
    return sum(counts) > _MOST_UNANSWERED
