"""The strategies whose clusters need servers are those of the registry."""

from launch.manifests.servers_of_command import STRATEGIES, num_servers
from strategies.registry import cluster_kind, strategy_names


def test_the_strategies_are_those_of_the_registry():
    assert tuple(name for name in strategy_names() if cluster_kind(name) == "servers") == STRATEGIES


def test_the_number():
    assert num_servers(["train", "--strategy=ps"], None) == 1
    assert num_servers(["train", "--strategy", "ps"], 3) == 3
    assert num_servers(["train", "--strategy=ring"], None) == 0
    assert num_servers(["a script"], 2) == 2
