"""A process's membership of the parameter servers' cluster."""

import pytest

from strategies.cluster import Cluster
from strategies.servers.membership import ServersMembership
from strategies.servers.options import ServersOptions


@pytest.mark.parametrize("staleness, examples", [("sync", 32), ("async", 96), ("2", 96)])
def test_own_examples(staleness, examples):
    addresses = {"chief": ("a:1",), "worker": ("b:1", "b:2", "b:3"), "ps": ("c:1",)}
    membership = ServersMembership(
        cluster=Cluster(addresses=addresses, role="worker", index=1), options=ServersOptions(staleness=staleness)
    )
    assert membership.own_examples(96) == examples
