"""Joining: who is refused before anything is sent, and who is named when somebody does not come."""

import contextlib
import socket
import threading
import time

import pytest

from launch.free_ports import free_addresses
from strategies import joining
from strategies.cluster import Cluster, Member
from strategies.joining import Ring, RingOptions, StartupWatch, check_free, join_ring, listens
from strategies.worker_exchange import WireOptions
from tests.launch.programs import run
from tests.towers.user_errors import refused

WAIT_SECONDS = 20
FAMILIES = {"127.0.0.1": socket.AF_INET, "[::1]": socket.AF_INET6}


@contextlib.contextmanager
def server(host="127.0.0.1"):
    """Listens there, on a port that is free; gives the address."""
    try:
        listening = socket.create_server((host.strip("[]"), 0), family=FAMILIES[host])
    except OSError as error:
        pytest.skip(f"nobody can listen on {host} here: {error}")
    with listening:
        yield f"{host}:{listening.getsockname()[1]}"


def free(host="127.0.0.1") -> str:
    """An address where nobody listens."""
    port = free_addresses(1)[0].rpartition(":")[2]
    return f"{host}:{port}"


def cluster(role="worker", index=0, **addresses) -> Cluster:
    return Cluster(addresses={key: tuple(value) for key, value in addresses.items()}, role=role, index=index)


def never(what: str) -> None:
    raise AssertionError(f"gave up: {what}")


class TestAddresses:
    @pytest.mark.parametrize("host", FAMILIES)
    def test_a_free_one(self, host):
        address = free(host)
        check_free(Member("worker", 1, address))
        assert not listens(address)

    @pytest.mark.parametrize("host", FAMILIES)
    def test_a_taken_one(self, host):
        with server(host) as address:
            assert listens(address)
            port = address.rpartition(":")[2]
            with refused(f"worker:1: port {port} of {address}", "in use", "choose another port"):
                check_free(Member("worker", 1, address))

    def test_one_that_was_used_a_moment_ago(self):
        """The kernel remembers a connection for a minute that the server closed."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            with socket.create_connection(listening.getsockname()) as client:
                listening.accept()[0].close()
                assert client.recv(1) == b""
            address = f"127.0.0.1:{listening.getsockname()[1]}"
        check_free(Member("worker", 0, address))

    def test_a_name_of_nobody(self):
        assert not listens("no-such-host.invalid:2222")

    def test_a_name_is_as_good_as_its_number(self):
        with server() as address:
            assert listens(address.replace("127.0.0.1", "localhost"))


class Watched:
    """Within, a watch looks for members and gives up after so many seconds; `said` holds what it gave up with."""

    def __init__(self, addresses, seconds):
        members = [Member("worker", index, address) for index, address in enumerate(addresses, start=1)]
        self.said, self._over, self._num_awaited = [], threading.Event(), len(members)
        self._watch = StartupWatch(members, seconds, self._give_up)

    def _give_up(self, what):
        self.said.append(what)
        self._over.set()

    def __enter__(self):
        self._watch.__enter__()
        return self

    def __exit__(self, *_):
        self._watch.__exit__()

    def until_one_came(self) -> None:
        deadline, count = time.monotonic() + WAIT_SECONDS, self._num_awaited
        while len(self._watch._missing) == count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def the_end(self) -> str:
        """What it gives up with, once."""
        assert self._over.wait(WAIT_SECONDS)
        (said,) = self.said
        assert "\n" not in said
        return said


class TestStartupWatch:
    @pytest.fixture(autouse=True)
    def looks_often(self, monkeypatch):
        monkeypatch.setattr(joining, "_PROBE_SECONDS", 0.02)

    def test_only_those_that_never_listened_are_named(self):
        missing, second = free(), free()
        with server() as there, Watched([there, missing, second], 0.3) as watched:
            said = watched.the_end()
        assert said.startswith(f"worker:2 ({missing}), worker:3 ({second}) did not come within ")
        assert "--startup_timeout_seconds=0.3" in said
        assert "TF_CONFIG" in said

    def test_one_that_came_and_went_has_come(self):
        """Its own log says why it went."""
        missing = free()
        with contextlib.ExitStack() as lives:
            address = lives.enter_context(server())
            with Watched([address, missing], 1.0) as watched:
                watched.until_one_came()
                lives.close()
                assert watched.the_end().startswith(f"worker:2 ({missing}) did not come")

    def test_all_listen_and_do_not_join(self):
        with server() as one, server() as other, Watched([one, other], 0.2) as watched:
            said = watched.the_end()
        assert said.startswith("all workers listen, but did not join within --startup_timeout_seconds=0.2")

    def test_who_has_joined_waits_no_longer(self):
        with Watched([free()], 0.2) as watched:
            pass
        time.sleep(0.4)
        assert watched.said == []

    def test_the_deadline_is_kept_where_looking_takes_long(self, monkeypatch):
        """As on a machine that drops what it is sent."""
        monkeypatch.setattr(joining, "listens", lambda address: time.sleep(0.1))
        began = time.monotonic()
        with Watched([free()] * 3, 0.5) as watched:
            watched.the_end()
        assert time.monotonic() - began < 5


class TestAlone:
    def test_a_ring_of_one(self):
        ring = Ring.alone()
        assert (ring.num_workers, ring.rank) == (1, 0)
        assert [member.name for member in ring.members] == ["worker:0"]
        assert ring.options == RingOptions()

    def test_its_options_are_kept(self):
        options = RingOptions(wire=WireOptions(bytes_per_pack=7))
        assert Ring.alone(options).options is options

    def test_channels_are_counted_by_ring(self):
        ring, other = Ring.alone(), Ring.alone()
        assert [ring.next_channel() for _ in range(3)] == [other.next_channel() for _ in range(3)] == [1, 2, 3]

    @pytest.mark.parametrize("role", ["worker", "chief"])
    def test_a_cluster_of_one_needs_no_server(self, role):
        """Its address is not even looked at."""
        with server() as taken:
            ring = join_ring(cluster(role, **{role: [taken]}), give_up=never)
        assert (ring.num_workers, ring.rank) == (1, 0)
        assert ring.members[0].name == f"{role}:0"
        assert not listens(taken)


class TestRefused:
    @pytest.mark.parametrize("role", ["ps", "evaluator"])
    def test_another_role(self, role):
        addresses = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
        with refused(f"role '{role}'", "chief and worker only"):
            join_ring(cluster(role, **addresses), give_up=never)

    def test_a_taken_address(self):
        with server() as address, refused("worker:1: port", address):
            join_ring(cluster("worker", 1, worker=[free(), address]), give_up=never)

    def test_a_process_in_which_tensorflow_runs(self, tmp_path):
        program = f"""
import tensorflow as tf
from strategies.cluster import Cluster
from strategies.joining import join_ring
tf.constant(1) + 1
addresses = {{"worker": {tuple(free_addresses(2))}}}
join_ring(Cluster(addresses=addresses, role="worker", index=0), give_up=print)
"""
        ended = run("-c", program, cwd=tmp_path)
        assert ended.code == 1
        last = ended.err.splitlines()[-1]
        assert last.startswith("towers.errors.UserError: strategy ring: TensorFlow is already running")
        assert last.endswith("join before the first tensor")


def test_ranks_are_the_chief_and_then_the_workers():
    described = {"worker": ["a:1", "b:1"], "chief": ["c:1"]}
    assert [cluster(role, index, **described).rank for role, index in [("chief", 0), ("worker", 1)]] == [0, 2]
