"""Both ends of each connection of ours detect a silent machine: the options of real sockets."""

import contextlib
import socket
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from launch.networks.network_namespaces import Network, enter, hosts
from strategies import keepalive
from strategies.cluster import Member
from strategies.errors import PeerLost
from strategies.ring.exchange.neighbours import prepare
from strategies.servers import wire
from strategies.servers.own.connections.group import Group
from tests.launch.system_networks import needs_hosts
from tests.strategies.servers import at_once
from tests.strategies.servers.own.test_server import CHIEF, WORKER, Losses, group, new_server, serving

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

    for module in ("server", "connections.group"):
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


# Larger than the system's buffers of a connection that nobody reads.
LARGE = np.arange(16 * 2**20, dtype=np.float32)


@contextlib.contextmanager
def server_and_worker(losses: Losses) -> Iterator[tuple[Network, Group]]:
    """A server on host 0, and a worker that is connected to it from host 1."""
    with hosts(2) as network:

        def on_host(host: int, act):
            def run():
                enter(network.namespace(host))
                return act()

            # In a thread, because a socket stays in the network of the thread that made it.
            return at_once.Started(run).result()

        member = Member("ps", 0, f"{network.address(0)}:2222")
        server = on_host(0, lambda: new_server(member, losses))
        started = at_once.Started(lambda: server.serve(at_once.LIMIT_SECONDS))
        with contextlib.ExitStack() as stack:
            chief, worker = (
                on_host(1, lambda this=this: stack.enter_context(group(member, this=this)))
                for this in (CHIEF, WORKER)
            )
            chief.ask(0, "init", [LARGE], key="a")
            yield network, worker
            network.plug(1)
            with contextlib.suppress(PeerLost):
                chief.ask(0, "end", how="done")
        with contextlib.suppress(PeerLost):
            started.result()


@pytest.mark.full
@needs_hosts
@pytest.mark.timeout(120)
class TestAVanishedMachine:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch):
        # A machine counts as vanished after 0.2 + 0.4 + 0.8 seconds.
        monkeypatch.setattr(keepalive, "_MOST_UNANSWERED", 2)

    def test_in_the_middle_of_an_answer(self):
        losses = Losses()
        with server_and_worker(losses) as (network, worker):
            worker.connections[0].send({"ask": "pull", "key": "a"})
            time.sleep(0.5)
            network.pull(1)
            assert losses.workers.get(timeout=12) == WORKER.index

    def test_in_the_middle_of_a_request(self):
        with server_and_worker(Losses()) as (network, worker):
            network.pull(1)
            began = time.monotonic()
            with pytest.raises(PeerLost, match="ps:0 .* was lost"):
                worker.ask(0, "write_part", [LARGE], key="a", table=None, slot=None, begin=0)
            assert time.monotonic() - began < 12

    def test_a_living_process_that_does_not_read_is_not_lost(self):
        losses = Losses()
        with server_and_worker(losses) as (_, worker):
            worker.connections[0].send({"ask": "pull", "key": "a"})
            time.sleep(4)
            assert losses.workers.empty()
            _, (found,) = worker.connections[0].answer()
            assert np.array_equal(found, LARGE)
