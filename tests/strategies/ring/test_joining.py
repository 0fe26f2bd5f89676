"""Joining a ring: which processes are refused, and which missing workers the error names."""

import contextlib
import socket
import threading
import time

import pytest

from launch.membership.free_ports import free_addresses
from strategies.cluster import Cluster, Member
from strategies.errors import PeerLost
from strategies.ring import joining
from strategies.ring.collectives import WireOptions
from strategies.ring.joining import Ring, RingOptions, join_ring, listening, listens, wait_for_all
from tests.launch.programs import run
from tests.towers.user_errors import refused

WAIT_SECONDS = 20
FAMILIES = {"127.0.0.1": socket.AF_INET, "[::1]": socket.AF_INET6}


@contextlib.contextmanager
def server(host="127.0.0.1"):
    """Context manager: listens on a free port of the host; yields the address."""
    try:
        found = socket.create_server((host.strip("[]"), 0), family=FAMILIES[host])
    except OSError as error:
        pytest.skip(f"cannot listen on {host} on this machine: {error}")
    with found:
        yield f"{host}:{found.getsockname()[1]}"


def free(host="127.0.0.1") -> str:
    """An address on which no process listens."""
    port = free_addresses(1)[0].rpartition(":")[2]
    return f"{host}:{port}"


def cluster(role="worker", index=0, **addresses) -> Cluster:
    return Cluster(addresses={key: tuple(value) for key, value in addresses.items()}, role=role, index=index)


class TestAddresses:
    @pytest.mark.parametrize("host", FAMILIES)
    def test_listening_on_a_free_address(self, host):
        address = free(host)
        with listening(Member("worker", 1, address)):
            assert listens(address)
        assert not listens(address)

    @pytest.mark.parametrize("host", FAMILIES)
    def test_listening_on_a_taken_address_is_refused(self, host):
        with server(host) as address:
            assert listens(address)
            port = address.rpartition(":")[2]
            with refused(f"worker:1: cannot listen on port {port} of {address}", "in use", "choose another port"):
                listening(Member("worker", 1, address))

    def test_listening_on_an_address_that_was_used_a_moment_ago(self):
        """After the server closes a connection, the kernel remembers it for a minute."""
        with socket.create_server(("127.0.0.1", 0)) as before:
            with socket.create_connection(before.getsockname()) as client:
                before.accept()[0].close()
                assert client.recv(1) == b""
            address = f"127.0.0.1:{before.getsockname()[1]}"
        listening(Member("worker", 0, address)).close()

    def test_an_unknown_host_does_not_listen(self):
        assert not listens("no-such-host.invalid:2222")

    def test_a_host_name_works_like_its_ip_address(self):
        with server() as address:
            assert listens(address.replace("127.0.0.1", "localhost"))


def waited_for(addresses, seconds) -> None:
    """Lets a worker at a free address wait for other workers at `addresses`."""
    others = [Member("worker", index, address) for index, address in enumerate(addresses, start=1)]
    wait_for_all(Member("worker", 0, free()), others, seconds)


class TestWaiting:
    def test_only_those_that_never_listened_are_named(self):
        missing, second = free(), free()
        with server() as there, pytest.raises(PeerLost) as raised:
            waited_for([there, missing, second], 0.3)
        message = str(raised.value)
        assert message.startswith(f"worker:2 ({missing}), worker:3 ({second}) did not start within ")
        assert "startup_timeout_seconds=0.3: " in message
        assert "TF_CONFIG" in message

    def test_a_late_worker_is_waited_for(self):
        address = free()
        host, port = address.split(":")
        late = threading.Timer(0.5, lambda: opened.append(socket.create_server((host, int(port)))))
        opened: list[socket.socket] = []
        late.start()
        began = time.monotonic()
        waited_for([address], WAIT_SECONDS)
        assert time.monotonic() - began > 0.4
        opened[0].close()

    def test_two_waiting_workers_find_each_other(self):
        """A worker that has found the other one keeps listening on its address, as TensorFlow's server does."""
        members = [Member("worker", index, free()) for index in (0, 1)]
        both = threading.Barrier(2, timeout=WAIT_SECONDS)

        def join(rank):
            wait_for_all(members[rank], [members[1 - rank]], WAIT_SECONDS)
            with listening(members[rank]):
                both.wait()

        other = threading.Thread(target=join, args=[1])
        other.start()
        join(0)
        other.join(WAIT_SECONDS)
        assert not other.is_alive()

    @pytest.mark.timeout(60)
    def test_a_slow_probe_does_not_delay_the_deadline(self, monkeypatch):
        """A probe is slow for example if a machine drops packets."""
        monkeypatch.setattr(joining, "listens", lambda address: time.sleep(0.1))
        with pytest.raises(PeerLost):
            waited_for([free()] * 3, 0.5)


class TestAlone:
    def test_a_ring_of_one(self):
        ring = Ring.alone()
        assert (ring.num_workers, ring.rank) == (1, 0)
        assert [member.name for member in ring.members] == ["worker:0"]
        assert ring.options == RingOptions()

    def test_a_ring_of_one_has_the_given_options(self):
        options = RingOptions(wire=WireOptions(bytes_per_pack=7))
        assert Ring.alone(options).options is options

    def test_channels_are_counted_by_ring(self):
        ring, other = Ring.alone(), Ring.alone()
        assert [ring.next_channel() for _ in range(3)] == [other.next_channel() for _ in range(3)] == [1, 2, 3]

    @pytest.mark.parametrize("role", ["worker", "chief"])
    def test_a_cluster_of_one_needs_no_server(self, role):
        """Its address is not used: it may be taken."""
        with server() as taken:
            ring = join_ring(cluster(role, **{role: [taken]}))
        assert (ring.num_workers, ring.rank) == (1, 0)
        assert ring.members[0].name == f"{role}:0"
        assert not listens(taken)


class TestRefused:
    @pytest.mark.parametrize("role", ["ps", "evaluator"])
    def test_a_role_outside_the_ring(self, role):
        addresses = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
        with refused(f"role '{role}'", "only the roles chief and worker"):
            join_ring(cluster(role, **addresses))

    def test_a_taken_address(self):
        with server() as address, refused("worker:1: cannot listen on port", address):
            join_ring(cluster("worker", 1, worker=[free(), address]))

    @pytest.mark.full
    def test_a_process_in_which_tensorflow_runs(self, tmp_path):
        with server() as other:
            ended = run("-c", self.PROGRAM % (free(), other), cwd=tmp_path)
        assert ended.code == 1
        last = ended.err.splitlines()[-1]
        assert last.startswith("towers.errors.UserError: strategy 'ring': TensorFlow already runs in this process")
        assert last.endswith("join before the first tensor")

    PROGRAM = """
import tensorflow as tf
from strategies.cluster import Cluster
from strategies.ring.joining import join_ring
tf.constant(1) + 1
join_ring(Cluster(addresses={"worker": ("%s", "%s")}, role="worker", index=0))
"""


def test_ranks_are_the_chief_and_then_the_workers():
    described = {"worker": ["a:1", "b:1"], "chief": ["c:1"]}
    assert [cluster(role, index, **described).rank for role, index in [("chief", 0), ("worker", 1)]] == [0, 2]
