"""A process's membership of the parameter servers' cluster."""

import pytest

from strategies.cluster import Cluster
from strategies.servers.membership import ServersMembership
from strategies.servers.options import ServersOptions
from tests.towers.user_errors import refused

ADDRESSES = {"chief": ("a:1",), "worker": ("b:1", "b:2", "b:3"), "ps": ("c:1",)}


@pytest.mark.parametrize("staleness, examples", [("sync", 32), ("async", 96), ("2", 96)])
def test_own_examples(staleness, examples):
    membership = ServersMembership(
        cluster=Cluster(addresses=ADDRESSES, role="worker", index=1), options=ServersOptions(staleness=staleness)
    )
    assert membership.own_examples(96) == examples


def test_an_engine_that_admits_everyone_anyway():
    cluster = Cluster(addresses=ADDRESSES, role="worker", index=1)
    ServersMembership(cluster=cluster, options=ServersOptions(engine="own"), admit_anyone=True)
    with refused("admit_anyone with TensorFlow's engine", "omit admit_anyone"):
        ServersMembership(cluster=cluster, admit_anyone=True)
