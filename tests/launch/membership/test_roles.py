"""The processes of a cluster, and which wait for which."""

from launch.membership.roles import Roles


def test_a_ring():
    roles = Roles(workers=2)
    assert roles.names == ("worker:0", "worker:1")
    assert (roles.reporter, roles.num_computing) == ("worker:0", 2)
    assert roles.awaited() == {}


def test_a_ring_with_a_chief():
    roles = Roles(workers=2, chief=True, evaluator=True)
    assert roles.names == ("chief:0", "worker:0", "worker:1", "evaluator:0")
    assert (roles.reporter, roles.num_computing) == ("chief:0", 4)
    assert roles.trainers == ("chief:0", "worker:0", "worker:1")
    assert roles.awaited() == {}
    assert roles.followed() == {"evaluator:0": roles.trainers}


def test_servers():
    roles = Roles(workers=1, ps=2, evaluator=True)
    assert roles.awaited() == {
        "ps:0": ("worker:0", "evaluator:0"),
        "ps:1": ("worker:0", "evaluator:0"),
    }
    assert roles.num_computing == 2


def test_an_evaluator_of_servers_with_a_chief():
    """It follows the chief alone: workers may be lost, and the run succeeds if the chief does."""
    assert Roles(workers=1, ps=1, chief=True, evaluator=True).followed() == {"evaluator:0": ("chief:0",)}


def test_servers_with_a_chief():
    roles = Roles(workers=1, ps=1, chief=True)
    assert roles.awaited() == {"ps:0": ("chief:0", "worker:0"), "worker:0": ("chief:0",)}
    assert roles.num_computing == 1


def test_a_cluster_for_each_process():
    roles = Roles(workers=2, ps=1, evaluator=True)
    clusters = roles.clusters()
    assert tuple(cluster.this.name for cluster in clusters) == roles.names
    assert all(cluster.addresses == clusters[0].addresses for cluster in clusters)
    assert {role: len(addresses) for role, addresses in clusters[0].addresses.items()} == {"worker": 2, "ps": 1}
