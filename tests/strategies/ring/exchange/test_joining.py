"""Joining a ring: which processes are refused."""

import pytest
import tensorflow as tf

from strategies.cluster import Cluster, Member
from strategies.ring.exchange.collectives import WireOptions
from strategies.ring.exchange.joining import Ring, RingOptions, implementation_of, join_ring
from strategies.waiting import listens
from tests.launch.programs import run
from tests.strategies.addresses import free, server
from tests.towers.user_errors import refused


def cluster(role="worker", index=0, **addresses) -> Cluster:
    return Cluster(addresses={key: tuple(value) for key, value in addresses.items()}, role=role, index=index)


def test_gpus_use_nccl():
    """TensorFlow's default AUTO would send everything through the host's memory."""
    implementations = tf.distribute.experimental.CommunicationImplementation
    assert implementation_of("auto", 1) is implementations.NCCL
    assert implementation_of("auto", 0) is implementations.AUTO
    assert implementation_of("ring", 1) is implementations.RING


class TestAlone:
    def test_a_ring_of_one(self):
        ring = Ring.alone()
        assert (ring.num_workers, ring.rank) == (1, 0)
        assert [member.name for member in ring.members] == ["worker:0"]
        assert ring.options == RingOptions()

    def test_a_ring_of_one_has_the_given_options(self):
        options = RingOptions(wire=WireOptions(bytes_per_pack=7))
        assert Ring.alone(options).options is options

    @pytest.mark.parametrize(
        "shares, examples", [(None, (50, 50, 50)), ((1.0, 3.0, 1.0), (30, 90, 30)), ((1.0, 2.0), (50, 50, 50))]
    )
    def test_own_examples(self, shares, examples):
        members = [Member("worker", index) for index in range(3)]
        rings = [Ring(members, rank, RingOptions(worker_shares=shares)) for rank in range(3)]
        assert tuple(ring.own_examples(150) for ring in rings) == examples

    def test_channels_are_counted_by_ring(self):
        ring, other = Ring.alone(), Ring.alone()
        assert [ring.next_channel() for _ in range(3)] == [other.next_channel() for _ in range(3)] == [1, 2, 3]

    @pytest.mark.parametrize("role", ["worker", "chief"])
    def test_a_cluster_of_one_needs_no_server(self, role):
        """A single member's address is not used, so another process may have it."""
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
from strategies.ring.exchange.joining import join_ring
tf.constant(1) + 1
join_ring(Cluster(addresses={"worker": ("%s", "%s")}, role="worker", index=0))
"""


def test_ranks_are_the_chief_and_then_the_workers():
    described = {"worker": ["a:1", "b:1"], "chief": ["c:1"]}
    assert [cluster(role, index, **described).rank for role, index in [("chief", 0), ("worker", 1)]] == [0, 2]
