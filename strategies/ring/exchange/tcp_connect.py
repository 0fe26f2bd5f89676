"""Connects the workers of a ring for `tcp_ring`, once TensorFlow's servers run."""

import secrets
import socket
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context  # the only way to ask TensorFlow whether a peer is alive

from strategies.cluster import Member
from strategies.door import Door
from strategies.ring.exchange.collectives import HostExchange
from strategies.ring.exchange.neighbours import Neighbours
from strategies.ring.exchange.tcp_ring import TcpRing

_HEALTH_MILLISECONDS = 3000
_TOKEN_NUMBERS = 2


def connected_tcp_ring(
    members: Sequence[Member], rank: int, host: HostExchange, *, timeout_seconds: float
) -> TcpRing:
    """Connects each rank to the next. All workers must call it.

    Each connection starts with a secret that was sent through TensorFlow; connections without it are closed. So
    only programs that can read the workers' messages can connect.

    Raises:
      TimeoutError, OSError: a connection failed.
    """
    token = host.gather("token", [secrets.randbits(62) for _ in range(_TOKEN_NUMBERS)], np.int64)[0].tobytes()
    with _listener(members[rank]) as listener:
        ports = host.gather("ports", [listener.getsockname()[1]], np.int64)[:, 0]
        next_rank = (rank + 1) % len(members)
        address = (members[next_rank].host, int(ports[next_rank]))
        to_next = socket.create_connection(address, timeout=timeout_seconds)
        to_next.sendall(token)
        from_previous = _accepted(listener, token, time.monotonic() + timeout_seconds)
    return TcpRing(
        Neighbours(
            rank,
            len(members),
            to_next,
            from_previous,
            timeout_seconds=timeout_seconds,
            check=lambda other: check_alive(members[other]),
        )
    )


def check_alive(member: Member) -> None:
    """Raises ConnectionError with TensorFlow's name of a member, if that member's server does not answer."""
    task = f"/job:{member.role}/replica:0/task:{member.index}"
    try:
        context.context().check_collective_ops_peer_health(task, _HEALTH_MILLISECONDS)
    except tf.errors.OpError as error:
        raise ConnectionError(f"{task} does not answer ({type(error).__name__})") from error


def _listener(member: Member) -> socket.socket:
    """Listens on the member's own address if it is an interface of this machine, else on all interfaces."""
    try:
        return socket.create_server((member.listening_host, 0), family=member.family)
    except OSError:
        return socket.create_server(("", 0), family=member.family)


def _accepted(listener: socket.socket, token: bytes, deadline: float) -> socket.socket:
    """The first connection that sends the token. All others are closed, without waiting for them.

    Raises:
      TimeoutError: no connection sent the token before the deadline.
    """
    with Door(listener, token) as door:
        while (left := deadline - time.monotonic()) > 0:
            if (found := door.let_in(left)) is not None:
                return found
    raise TimeoutError("the previous worker did not connect")
