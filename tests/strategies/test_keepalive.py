"""Both ends of each connection of ours detect a silent machine: the options of real sockets."""

import socket
import sys

import pytest

from strategies.ring.tcp_ring import prepare
from strategies.servers import wire
from tests.strategies.servers import at_once
from tests.strategies.servers.own.test_server import WORKER, group, serving

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other options")


def silent_seconds(end: socket.socket) -> int:
    """Seconds of silence after which the system breaks this connection; 0 if it never does."""
    if not end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        return 0
    first, interval, count = (
        end.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    return first + interval * count


@needs_linux
def test_a_server_and_its_client(monkeypatch):
    ends = []

    class Watched(wire.Connection):
        def __init__(self, connected, *given):
            super().__init__(connected, *given)
            ends.append(connected)

    for module in ("server", "group"):
        monkeypatch.setattr(f"strategies.servers.own.{module}.Connection", Watched)
    with serving() as (member, _), group(member, this=WORKER) as worker:
        worker.ask(0, "keys")
        assert len(ends) == 2 and ends[0].getpeername() == ends[1].getsockname()
        assert [silent_seconds(end) for end in ends] == [30, 30]


@needs_linux
def test_a_rings_neighbours():
    with at_once.loopback() as ends:
        for end in ends:
            assert silent_seconds(end) == 0
            prepare(end)
            assert silent_seconds(end) == 30
