"""A server and the processes that connect to it: admission, requests, losses and the end."""

import contextlib
import errno
import functools
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from launch.membership.free_ports import free_addresses
from strategies.cluster import Cluster, Member
from strategies.errors import PeerLost
from strategies.servers.membership import ServersMembership
from strategies.servers.options import ServersOptions
from strategies.servers.own import server as server_module
from strategies.servers.own.connections import stranger_limit as strangers
from strategies.servers.own.connections.entrance import introduce
from strategies.servers.own.connections.group import Group
from strategies.servers.own.handlers import StoreHandlers
from strategies.servers.own.roles import run_own_worker
from strategies.servers.own.rows import Rows, SplitGradient
from strategies.servers.own.server import Server
from strategies.servers.wire import Connection, Refused, RunEnded
from strategies.waiting import listens
from tests.strategies.servers.at_once import LIMIT_SECONDS, Started, at_once, let_in, loopback
from tests.tiers import first_quick
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.updates.clipping import Clipping
from towers.updates.rules import Momentum

SETTINGS = {"flags": 1, "rule": 2}
SECRET = "grün und 緑"
CHIEF, WORKER = Member("chief", 0), Member("worker", 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(server_module, "_TICK_SECONDS", 0.02)


def new_member(index: int = 0) -> Member:
    return Member("ps", index, free_addresses(1)[0])


def new_server(member: Member, coordination=None) -> Server:
    store = StoreHandlers(Momentum(momentum=0.5), Clipping())
    return Server(member, store, settings=SETTINGS, secret=SECRET, coordination=coordination)


@contextlib.contextmanager
def group(*servers: Member, this=CHIEF, settings=SETTINGS, secret=SECRET, startup=5.0) -> Iterator[Group]:
    """Connections to these servers, closed at the end."""
    found = Group.connected(
        servers,
        this,
        settings=settings,
        secret=secret,
        startup_timeout_seconds=startup,
        timeout_seconds=LIMIT_SECONDS,
    )
    try:
        yield found
    finally:
        found.close()


def end(member: Member, how: str = "done") -> None:
    with group(member) as chief:
        chief.ask(0, "end", how=how)


def end_all(*members: Member) -> None:
    with group(*members) as chief:
        chief.ask_all("end", how="done")


def serving_with_timeout(member: Member, timeout_seconds: float, coordination=None) -> Started:
    """A server that counts a chief as lost after `timeout_seconds` of silence."""
    store, seconds = StoreHandlers(Momentum(), Clipping()), timeout_seconds
    server = Server(
        member, store, settings=SETTINGS, secret=SECRET, coordination=coordination, timeout_seconds=seconds
    )
    return Started(lambda: server.serve(LIMIT_SECONDS))


@contextlib.contextmanager
def serving(index: int = 0, coordination=None) -> Iterator[tuple[Member, Started]]:
    """A server, and the thread in which it serves."""
    member = new_member(index)
    server = new_server(member, coordination)
    started = Started(lambda: server.serve(LIMIT_SECONDS))
    try:
        yield member, started
    finally:
        if started.is_running:
            if listens(member.address):
                end(member)
            started.result()


class TestRequests:
    def test_a_key_is_set_pushed_to_and_pulled(self):
        with serving() as (member, _), group(member, this=WORKER) as worker:
            worker.ask(0, "init", [np.arange(5, dtype=np.float32)], key="a", about={"shape": [5]})
            assert worker.ask(0, "keys")[0] == {"about": {"a": {"shape": [5]}}}
            for pushes in range(3):
                reply, _ = worker.ask(0, "push", [np.ones(5, np.float32)], key="a", rows=[], rate=1.0, since=0)
                assert reply == {"staleness": pushes}
            reply, (value,) = worker.ask(0, "pull", key="a")
        assert reply == {"version": 3}
        assert value.dtype == np.float32
        # With a momentum coefficient of 0.5 the steps are 1, 1.5 and 1.75.
        assert value.tolist() == [-4.25, -3.25, -2.25, -1.25, -0.25]

    def test_rows(self):
        gradient = SplitGradient(np.ones(1), [Rows(1, 3, 2, np.array([2]), np.array([[5.0, 7.0]]))])
        extents, arrays = gradient.packed()
        with serving() as (member, _), group(member, this=WORKER) as worker:
            worker.ask(0, "init", [np.zeros(7)], key="a")
            worker.ask(0, "push", arrays, key="a", rows=extents, rate=1.0)
            assert worker.ask(0, "pull", key="a")[1][0].tolist() == [-1, 0, 0, 0, 0, -5, -7]

    def test_slots_are_set_and_read(self):
        with serving() as (member, _), group(member) as chief:
            chief.ask(0, "init", [np.zeros(2)], key="a")
            for slot, value in ((None, np.ones(2)), ("momentum", np.full(2, 4.0))):
                chief.ask(0, "write_part", [value], key="a", table=None, slot=slot, begin=0)
            chief.ask(0, "restart", key="a", version=9)
            chief.ask(0, "push", [np.zeros(2)], key="a", rows=[], rate=1.0)
            _, (slot,) = chief.ask(0, "read_part", key="a", table=None, slot="momentum", begin=0, end=2)
            assert slot.tolist() == [2, 2]
            reply, (value,) = chief.ask(0, "pull", key="a")
            assert (reply, value.tolist()) == ({"version": 10}, [3, 3])
            chief.ask(0, "end", how="done")

    def test_a_step_of_several_workers(self):
        """The sum of the wanted leases is divided by the weight and scaled; held gradients are then dropped."""
        step = {"key": "a", "step": 4, "leases": [0, 2]}
        with serving() as (member, _), group(member, this=WORKER) as other:
            other.ask(0, "init", [np.zeros(2)], key="a")
            for lease in range(3):
                gradient = np.array([3.0, 4.0]) * 10**lease
                other.ask(0, "hold", [gradient], key="a", rows=[], step=4, lease=lease)
            assert other.ask(0, "square", **step)[0] == {"square": 303.0**2 + 404.0**2}
            other.ask(0, "apply", **step, finite=True, weight=4.0, scale=2.0, rate=1.0)
            assert other.ask(0, "pull", key="a")[1][0].tolist() == [-151.5, -202.0]
            with pytest.raises(Refused, match="step 4"):
                other.ask(0, "square", **step)

    def test_several_servers_with_different_keys(self):
        with serving() as (first, _), serving(1) as (second, _), group(first, second, this=WORKER) as worker:
            requests = {server: ({"key": f"k{server}"}, [np.full(2, server + 1.0)]) for server in (0, 1)}
            worker.ask_each("init", requests)
            worker.ask(1, "push", [np.ones(2)], key="k1", rows=[], rate=1.0)
            assert [reply["about"] for reply, _ in worker.ask_all("keys")] == [{"k0": None}, {"k1": None}]
            assert [worker.ask(server, "pull", key=f"k{server}")[1][0][0] for server in (0, 1)] == [1, 1]

    def test_pushes_at_once(self):
        def push():
            with group(member, this=WORKER) as worker:
                for _ in range(20):
                    worker.ask(0, "push", [np.zeros(9)], key="a", rows=[], rate=1.0)

        with serving() as (member, _), group(member, this=WORKER) as worker:
            worker.ask(0, "init", [np.zeros(9)], key="a")
            at_once(*[push] * 4)
            assert worker.ask(0, "pull", key="a")[0] == {"version": 80}

    def test_several_requests_to_one_server_in_turn(self):
        push = {"ask": "push", "key": "a", "rows": [], "rate": 1.0}
        with serving() as (member, _), group(member, this=WORKER) as worker:
            worker.ask(0, "init", [np.zeros(2)], key="a")
            pull = {"ask": "pull", "key": "a"}
            *_, (reply, (value,)) = worker.ask_in_turn(0, (push, [np.ones(2)]), (pull, ()))
            assert (reply, value.tolist()) == ({"version": 1}, [-1, -1])

    def test_figures(self):
        """The figures include closed connections."""
        with serving() as (member, _), group(member, this=WORKER) as other:
            with group(member, this=WORKER) as worker:
                worker.ask(0, "init", [np.zeros(1000)], key="a")
                worker.ask(0, "pull", key="a")
            other.ask(0, "pull", key="a")
            other.ask(0, "push", [np.zeros(1000)], key="a", rows=[], rate=1.0)
            figures, _ = other.ask(0, "figures")
        assert (figures["pulls"], figures["pushes"]) == (2, 1)
        for name in ("sent_bytes", "received_bytes"):
            assert 16_000 < figures[name] < 17_000


class TestRefusedRequests:
    @pytest.mark.parametrize("name", ["nonsense", "_store", "__init__", "pulls", "requests"])
    def test_an_unknown_request(self, name):
        with serving() as (member, _), group(member, this=WORKER) as worker:
            with pytest.raises(Refused, match=name):
                worker.ask(0, name)
            assert worker.ask(0, "keys")[0] == {"about": {}}

    def test_what_server_0_does_itself_is_no_request(self):
        with serving(coordination=Losses()) as (member, _), group(member, this=WORKER) as worker:
            for name in ("lost", "overdue", "close"):
                with pytest.raises(Refused, match=name):
                    worker.ask(0, name)

    def test_a_user_error(self):
        with serving() as (member, _), group(member, this=WORKER) as worker:
            with refused("init of 'a'", "int64"):
                worker.ask(0, "init", [np.zeros(2, np.int64)], key="a")
            assert worker.ask(0, "keys")[0] == {"about": {}}

    def test_a_refusal_by_one_of_several_servers(self):
        """The other servers' replies are not taken for those to the next request."""
        with serving() as (first, _), serving(1) as (second, _), group(first, second, this=WORKER) as worker:
            worker.ask(1, "init", [np.zeros(2)], key="a")
            with pytest.raises(Refused, match="'a'"):
                worker.ask_all("pull", key="a")
            assert [reply for reply, _ in worker.ask_all("keys")] == [{"about": {}}, {"about": {"a": None}}]

    def test_a_refusal_of_the_first_of_several_requests(self):
        with serving() as (member, _), group(member, this=WORKER) as worker:
            with pytest.raises(Refused, match="'a'"):
                worker.ask_in_turn(0, ({"ask": "pull", "key": "a"}, ()), ({"ask": "keys"}, ()))
            assert "pulls" in worker.ask(0, "figures")[0]

    def test_an_unexpected_error_ends_only_its_own_connection(self, caplog):
        with serving() as (member, _), group(member, this=WORKER) as worker:
            worker.ask(0, "init", [np.zeros(2)], key="a")
            with group(member, this=WORKER) as other, pytest.raises(PeerLost, match="ps:0"):
                other.ask(0, "push", [np.zeros(2)], key="a", rows=[], rate="fast")
            assert worker.ask(0, "pull", key="a")[0] == {"version": 0}
        assert "a request of worker:1 could not be answered" in caplog.text


class TestAdmission:
    @pytest.mark.parametrize("secret", ["", "grün", "other"])
    def test_another_secret(self, secret):
        with (
            serving() as (member, _),
            refused("ps:0", member.address, "its secret differs"),
            group(member, this=WORKER, secret=secret),
        ):
            pass

    @pytest.mark.parametrize("settings", [{**SETTINGS, "rule": 3}, {"flags": 1}])
    def test_other_settings(self, settings):
        with (
            serving() as (member, _),
            refused(
                "worker:1 was started with rule=",
                "and ps:0 with rule=2: start all",
            ),
            group(member, this=WORKER, settings=settings),
        ):
            pass

    def test_a_chief_with_other_settings_ends_the_server_that_waits_for_it(self):
        server = new_server(member := new_member())
        started = Started(lambda: server.serve(LIMIT_SECONDS))
        message = "chief:0 was started with rule=3, and ps:0 with rule=2"
        with refused(message), group(member, settings={**SETTINGS, "rule": 3}):
            pass
        with refused(message):
            started.result()

    def test_a_worker_of_another_cluster_does_not_replace_the_runs_own(self):
        member = new_member()
        server = Server(member, StoreHandlers(Momentum(), Clipping()), settings={}, secret="", cluster=7)
        started = Started(lambda: server.serve(LIMIT_SECONDS))
        more = {"settings": {}, "secret": "", "startup_timeout_seconds": 5.0, "timeout_seconds": LIMIT_SECONDS}
        with (
            contextlib.closing(Group.connected([member], CHIEF, **more)) as chief,
            contextlib.closing(Group.connected([member], WORKER, cluster=7, **more)) as worker,
        ):
            with refused("worker:1 belongs to another cluster than ps:0", "servers of its own"):
                Group.connected([member], WORKER, cluster=8, **more)
            worker.ask(0, "keys")
            chief.ask(0, "end", how="done")
        assert started.result() == "done"

    def test_a_process_without_settings(self):
        with serving() as (member, _), group(member, this=WORKER, settings={}) as visitor:
            assert visitor.ask(0, "keys")[0] == {"about": {}}

    def test_a_client_of_another_protocol(self):
        with serving() as (member, started):
            with socket.create_connection((member.host, member.port), timeout=LIMIT_SECONDS) as other:
                other.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    assert other.recv(1) == b""
            with group(member, this=WORKER) as worker:
                worker.ask(0, "keys")
            assert started.is_running

    def test_a_silent_client_disturbs_no_other(self):
        with (
            serving() as (member, _),
            socket.create_connection((member.host, member.port)),
            group(member, this=WORKER) as worker,
        ):
            worker.ask(0, "keys")


class TestSecondChief:
    def test_it_is_refused_by_name_and_changes_nothing(self):
        with serving() as (member, started), group(member) as chief:
            chief.ask(0, "init", [np.ones(2)], key="a")
            named = f"process {os.getpid()} on {socket.gethostname()}"
            with refused(f"ps:0 serves another chief already ({named})", "servers of its own"), group(member):
                pass
            with group(member, this=WORKER) as worker:
                assert worker.ask(0, "pull", key="a")[1][0].tolist() == [1, 1]
            assert started.is_running
            chief.ask(0, "end", how="done")


class TestStrangers:
    """A stranger that connects can hold neither threads nor memory, and keeps no member out."""

    @staticmethod
    def stranger(member: Member) -> socket.socket:
        return socket.create_connection((member.host, member.port), timeout=LIMIT_SECONDS)

    def test_a_crowd_of_silent_ones(self, monkeypatch):
        monkeypatch.setattr(strangers, "_MOST", 8)
        with serving() as (member, _), contextlib.ExitStack() as crowd:
            before = threading.active_count()
            for _ in range(64):
                crowd.enter_context(self.stranger(member))
            with group(member, this=WORKER) as worker:
                worker.ask(0, "keys")
                # A thread ends a moment after its connection; all connections would end after ten seconds.
                deadline = time.monotonic() + 6
                while threading.active_count() - before >= 20:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)

    def test_a_silent_one_is_closed_after_its_time(self, monkeypatch):
        monkeypatch.setattr(server_module, "_INTRODUCTION_SECONDS", 0.1)
        with serving() as (member, _), group(member, this=WORKER) as worker, self.stranger(member) as silent:
            assert silent.recv(1) == b""
            assert worker.ask(0, "keys")[0] == {"about": {}}

    def test_a_thread_that_can_not_be_started(self, monkeypatch):
        """The server accepts the next connection."""
        started, failures = threading.Thread.start, []

        def start(thread):
            if thread._target.__name__ == "_serve_one" and len(failures) < 2:
                failures.append(thread)
                raise RuntimeError("can't start new thread")
            started(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        with serving() as (member, _), group(member, this=WORKER) as worker:
            assert len(failures) == 2
            assert worker.ask(0, "keys")[0] == {"about": {}}

    @pytest.mark.parametrize("text", [b"[" * 4000, b'{"": []}', b'{"": [["float32", [2000000000]]]}'])
    def test_no_traceback(self, text, caplog):
        with serving() as (member, _), self.stranger(member) as other:
            other.sendall(struct.pack("<4sI", b"TOW1", len(text)) + text)
            with contextlib.suppress(ConnectionError):
                assert other.recv(1) == b""
        assert caplog.text == ""


class TestSecret:
    def test_it_is_never_sent(self):
        def record() -> bytes:
            with listener.accept()[0] as other:
                other.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    return other.recv(4096)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = Member("ps", 0, f"127.0.0.1:{listener.getsockname()[1]}")
            recorded = Started(record)
            with pytest.raises(PeerLost), group(server, this=WORKER, secret="swordfish", startup=0.1):
                pass
            assert b"swordfish" not in recorded.result()

    @pytest.mark.parametrize("proof", [{}, {"proof": 0}, {"proof": "0" * 64}])
    def test_a_server_that_does_not_know_it_is_refused(self, proof):
        def answer():
            with listener.accept()[0] as accepted:
                connection = Connection(accepted, LIMIT_SECONDS)
                hello, _ = connection.receive()
                # A server that sends the client's own message back still does not know the secret.
                connection.send(hello)
                connection.receive()
                connection.send(proof)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = Member("ps", 0, f"127.0.0.1:{listener.getsockname()[1]}")
            answered = Started(answer)
            with refused("ps:0", server.address, "does not know this run's secret"), group(server, this=WORKER):
                pass
            answered.result()

    def test_what_was_heard_once_lets_nobody_in(self):
        """A client that repeats another client's proof is refused."""
        with serving() as (member, _):
            heard = []
            with socket.create_connection((member.host, member.port)) as connected:
                connection = Connection(connected, LIMIT_SECONDS)

                def send(message, arrays=()):
                    heard.append(message)
                    Connection.send(connection, message, arrays)

                connection.send = send
                introduce(connection, WORKER, member, settings={}, secret=SECRET)
            with socket.create_connection((member.host, member.port)) as connected:
                again = Connection(connected, LIMIT_SECONDS)
                again.ask(heard[0])
                with pytest.raises(Refused, match="secret differs"):
                    again.ask(heard[1])

    def test_an_address_of_other_machines_needs_one(self):
        member = Member("ps", 0, f"192.0.2.1:{new_member().port}")
        store = StoreHandlers(Momentum(), Clipping())
        needed = f"ps:0 ({member.address}) can be reached from other machines", "TOWERS_SECRET", "admit_anyone"
        with refused(*needed):
            Server(member, store, settings={}, secret="")
        with refused(*needed), group(member, secret=""):
            pass
        Server(member, store, settings={}, secret="", admit_anyone=True)._close()
        for host, is_needed in (("localhost", False), ("[::1]", False), ("0.0.0.0", True)):
            assert Member("ps", 0, f"{host}:1").is_loopback is not is_needed


class TestListening:
    def test_a_taken_port(self):
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"127.0.0.1:{other.getsockname()[1]}"
            with refused(f"ps:2 can't listen on {address}", "in use", "another port"):
                new_server(Member("ps", 2, address))

    def test_a_port_without_permission(self, monkeypatch):
        def create_server(*arguments, **named):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(socket, "create_server", create_server)
        with refused("ps:0 can't listen on 127.0.0.1:80", "Permission denied", "above 1023"):
            new_server(Member("ps", 0, "127.0.0.1:80"))

    def test_an_address_of_another_machine(self):
        """For example if the name is a load balancer's: the server then listens on all its own addresses."""
        port = new_member().port
        server = new_server(Member("ps", 0, f"192.0.2.1:{port}"))
        started = Started(lambda: server.serve(LIMIT_SECONDS))
        end(Member("ps", 0, f"127.0.0.1:{port}"))
        assert started.result() == "done"


class Losses:
    """Server 0's coordination in these tests: it records the lost workers."""

    requests = {}

    def overdue(self) -> set[int]:
        return set()

    def __init__(self):
        self.workers: queue.Queue[int] = queue.Queue()
        self.is_closed = False

    def connected(self, worker: int, connection: int) -> None:
        """Does nothing: only losses are recorded."""

    def lost(self, worker: int) -> None:
        self.workers.put(worker)

    def close(self) -> None:
        self.is_closed = True


class SlowLoss(Losses):
    """Records connections and losses in order; handling a loss takes a while."""

    def __init__(self):
        super().__init__()
        self._noted: queue.Queue[tuple[str, int]] = queue.Queue()

    def connected(self, worker: int, connection: int) -> None:
        self._noted.put(("connected", worker))

    def lost(self, worker: int) -> None:
        self._noted.put(("losing", worker))
        time.sleep(0.3)
        self._noted.put(("lost", worker))

    def next(self) -> tuple[str, int]:
        return self._noted.get(timeout=LIMIT_SECONDS)


class Slow(Losses):
    @property
    def requests(self):
        return {"think": self.think}

    def think(self, message, arrays):
        time.sleep(1.2)
        return {"thought": True}, ()


class TestEnd:
    @pytest.mark.parametrize("how", ["done", "interrupted"])
    def test_the_chief_decides_how_the_run_ended(self, how):
        with serving() as (member, started):
            end(member, how)
            assert started.result() == how

    def test_others_learn_of_the_end_before_the_server_exits(self):
        with serving() as (member, started), group(member, this=WORKER) as worker:
            end(member)
            time.sleep(0.1)
            assert worker.ask(0, "keys")[0] == {"about": {}}
            worker.close()
            assert started.result() == "done"

    @pytest.mark.parametrize(
        "asks",
        first_quick([lambda worker: worker.check(0), lambda worker: worker.ask(1, "keys")]),
        ids=["check", "ask"],
    )
    def test_a_worker_that_computes_until_the_servers_have_ended_learns_how_the_run_ended(self, monkeypatch, asks):
        monkeypatch.setattr(server_module, "_LAST_SECONDS", 0.05)
        with contextlib.ExitStack() as servers:
            members, started = zip(*(servers.enter_context(serving(index)) for index in range(2)), strict=True)
            worker = servers.enter_context(group(*members, this=WORKER))
            end_all(*members)
            assert [server.result() for server in started] == ["done", "done"]
            with pytest.raises(RunEnded, match="done"):
                asks(worker)

    def test_a_worker_whose_servers_are_lost_hears_of_no_end(self):
        with serving() as (member, _), group(member, this=WORKER) as worker:
            worker.connections[0].end()
            with pytest.raises(PeerLost, match="ps:0"):
                worker.ask(0, "keys")

    def test_no_process_connects_after_the_end(self):
        with serving() as (member, _), group(member, this=WORKER):
            end(member)
            with pytest.raises(PeerLost, match="ps:0"), group(member, startup=0.2):
                pass

    def test_the_next_run_may_use_the_port_at_once(self):
        with serving() as (member, started):
            end(member)
            started.result()
        again = new_server(member)
        started = Started(lambda: again.serve(LIMIT_SECONDS))
        end(member)
        assert started.result() == "done"

    def test_workers_that_leave_after_the_end_are_not_lost(self):
        losses = Losses()
        with serving(coordination=losses) as (member, started):
            with group(member, this=WORKER):
                end(member)
            started.result()
        assert losses.workers.empty()
        assert losses.is_closed


class TestLost:
    def test_the_chief(self):
        with serving() as (member, started), group(member, this=WORKER) as worker:
            with group(member):
                assert started.is_running
            with pytest.raises(PeerLost, match="the chief was lost: restart all processes"):
                started.result()
            with pytest.raises(PeerLost, match="ps:0"):
                worker.ask(0, "keys")

    def test_a_chief_that_is_lost_while_it_is_let_in(self, monkeypatch):
        """Otherwise the server would wait for it forever, and refuse every other chief."""
        send = Connection.send

        def broken(connection, message, arrays=()):
            if set(message) == {"proof"}:
                connection.end()
            send(connection, message, arrays)

        monkeypatch.setattr(Connection, "send", broken)
        server = new_server(member := new_member())
        started = Started(lambda: server.serve(LIMIT_SECONDS))
        with pytest.raises(PeerLost, match="ps:0"), group(member, startup=0.1):
            pass
        with pytest.raises(PeerLost, match="the chief was lost"):
            started.result()

    def test_an_idle_stranger_does_not_delay_the_end(self):
        with serving() as (member, started), socket.create_connection((member.host, member.port)):
            with group(member) as chief:
                chief.ask(0, "end", how="done")
            began = time.monotonic()
            assert started.result() == "done"
            assert time.monotonic() - began < 2

    @pytest.mark.parametrize("shows_life", [True, False])
    def test_a_chief_that_stands_still(self, shows_life):
        """An evaluating chief may ask nothing for long, but shows that it lives; a stopped chief does not."""
        member = new_member()
        started = serving_with_timeout(member, 0.15)
        with group(member) as chief:
            chief.ask(0, "keys")
            if shows_life:
                chief.show_life(0.02)
                time.sleep(0.25)
                chief.ask(0, "end", how="done")
            else:
                with pytest.raises(PeerLost, match=r"the chief was silent for 0\.15 seconds: restart all"):
                    started.result()
        if shows_life:
            # The server waits until the chief has closed its connection.
            assert started.result() == "done"

    @pytest.mark.parametrize("timeout_seconds", [None, 600.0])
    @pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
    def test_the_machine_of_the_chief_vanishes(self, monkeypatch, timeout_seconds):
        """The system detects this after half a minute, however long the chief may be silent."""
        member = new_member()
        started = serving_with_timeout(member, timeout_seconds)
        with group(member) as chief:
            chief.ask(0, "keys")

            def vanished(connection, view):
                raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

            monkeypatch.setattr(Connection, "_received_into", vanished)
            chief.connections[0].send({"ask": "keys"})
            with pytest.raises(PeerLost, match="the chief was lost: restart all"):
                started.result()

    def test_a_chief_that_waits_for_a_server_which_starts_later(self):
        first, second = new_member(0), new_member(1)
        started = [serving_with_timeout(first, 0.15)]
        connected = Started(lambda: end_all(first, second))
        time.sleep(0.4)
        assert connected.is_running and started[0].is_running
        started.append(serving_with_timeout(second, 0.15))
        connected.result()
        assert [server.result() for server in started] == ["done", "done"]

    @pytest.mark.full
    def test_a_chief_that_asks_one_server_for_long(self):
        members = [new_member(index) for index in range(2)]
        started = [serving_with_timeout(members[0], 60.0, Slow()), serving_with_timeout(members[1], 1.5)]
        with group(*members) as chief:
            chief.ask_all("keys")
            chief.show_life(0.1)
            thoughts = chief.ask_in_turn(0, ({"ask": "think"}, ()), ({"ask": "think"}, ()))
            assert len(thoughts) == 2, "in 2.4 seconds"
            chief.ask_all("end", how="done")
        assert [server.result() for server in started] == ["done", "done"]

    def test_a_late_loss_does_not_undo_the_workers_new_connection(self):
        noted = SlowLoss()
        with serving(coordination=noted) as (member, _), group(member, this=WORKER) as before:
            assert noted.next() == ("connected", WORKER.index)
            before.close()
            # Connects again while server 0 handles the loss.
            assert noted.next() == ("losing", WORKER.index)
            with group(member, this=WORKER):
                assert [noted.next(), noted.next()] == [("lost", WORKER.index), ("connected", WORKER.index)]

    @pytest.mark.full
    def test_a_server_that_is_lost_while_the_chief_only_shows_that_it_lives(self):
        with contextlib.suppress(PeerLost), serving() as (member, _), group(member) as chief:
            chief.show_life(0.02)
            for connection in chief.connections:
                connection.close()
            with pytest.raises(PeerLost, match=f"{member.name} .* was lost"):
                for _ in range(10):
                    time.sleep(0.02)
                    chief.ask(0, "keys")

    def test_a_stop_signal_ends_a_server_that_waits_for_its_chief(self):
        server = new_server(new_member())
        assert Started(lambda: server.serve(LIMIT_SECONDS, stop_asked=lambda: True)).result() == "interrupted"

    def test_a_stop_signal_during_a_run_is_left_to_the_chief(self):
        asked = threading.Event()
        server = new_server(member := new_member())
        started = Started(lambda: server.serve(LIMIT_SECONDS, stop_asked=asked.is_set))
        with group(member) as chief:
            asked.set()
            time.sleep(0.2)
            assert started.is_running
            chief.ask(0, "end", how="done")
        assert started.result() == "done"

    def test_a_stop_signal_ends_a_worker_that_waits_for_its_servers(self):
        addresses = {role: (new_member().address,) for role in ("chief", "worker", "ps")}
        cluster = Cluster(addresses=addresses, role="worker", index=0)
        membership = ServersMembership(cluster=cluster, options=ServersOptions(engine="own"), secret=SECRET)
        began = time.monotonic()
        run = functools.partial(run_own_worker, None, None, StepOptions(), membership)
        assert Started(lambda: run(stop_asked=lambda: True)).result() == "interrupted"
        assert time.monotonic() - began < 5

    def test_a_chief_that_never_connects(self):
        server = new_server(new_member())
        with pytest.raises(PeerLost, match=r"the chief did not connect within 0\.3 seconds"):
            server.serve(0.3)

    def test_a_worker_does_not_count_as_the_chief(self):
        server = new_server(member := new_member())
        started = Started(lambda: server.serve(0.5))
        with group(member, this=WORKER), pytest.raises(PeerLost, match="the chief did not connect"):
            started.result()

    def test_a_worker(self):
        losses = Losses()
        with serving(coordination=losses) as (member, started):
            with group(member, this=WORKER):
                pass
            assert losses.workers.get(timeout=LIMIT_SECONDS) == WORKER.index
            assert started.is_running

    def test_another_server(self):
        losses = Losses()
        with serving(coordination=losses) as (member, started):
            with group(member, this=Member("ps", 1)):
                pass
            time.sleep(0.1)
            assert started.is_running
            assert losses.workers.empty()


class TestGroup:
    def test_a_server_that_can_not_be_reached(self):
        missing = new_member(1)
        with (
            serving() as (member, _),
            pytest.raises(PeerLost) as raised,
            group(member, missing, this=WORKER, startup=0.4),
        ):
            pass
        message = str(raised.value)
        assert message.startswith(f"ps:1 ({missing.address}) could not be reached within 0.4 seconds")
        assert "raise startup_timeout_seconds" in message

    def test_a_server_that_starts_late(self):
        member = new_member()
        connected = Started(lambda: end(member))
        time.sleep(0.3)
        assert connected.is_running
        server = new_server(member)
        assert server.serve(LIMIT_SECONDS) == "done"
        connected.result()

    def test_another_program_that_listens_and_is_silent(self):
        with socket.create_server(("127.0.0.1", 0)) as other:
            member = Member("ps", 0, f"127.0.0.1:{other.getsockname()[1]}")
            with pytest.raises(PeerLost, match="ps:0 .* could not be reached"), group(member, startup=0.4):
                pass

    def test_a_server_that_is_lost(self):
        with loopback() as (here, there):
            found = Group([Member("ps", 1, "b:1")], [let_in(here)])
            there.close()
            with pytest.raises(PeerLost, match=r"ps:1 \(b:1\) was lost: restart all processes"):
                found.ask(0, "keys")

    def test_a_server_that_falls_silent(self):
        with loopback() as (here, _):
            found = Group([Member("ps", 0, "a:1")], [let_in(here, 0.2)])
            with pytest.raises(PeerLost, match=r"ps:0 \(a:1\) was silent for too long"):
                found.ask(0, "keys")

    def test_the_startup_timeout_does_not_limit_replies(self):
        """A connected server may be silent for longer than that."""
        with serving(coordination=Slow()) as (member, _), group(member, this=WORKER, startup=1.0) as worker:
            assert worker.ask(0, "think")[0] == {"thought": True}
