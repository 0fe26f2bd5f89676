"""Strategies by name."""

import pytest

from strategies.registry import build_strategy, cluster_kind, strategy_names
from tests.strategies.small_task import small_strategy, small_task
from tests.towers.logical_cpus import cpus
from tests.towers.user_errors import refused
from towers.options import StepOptions

# A single process can't build a strategy with parameter servers.
ALONE = [name for name in strategy_names() if cluster_kind(name) != "servers"]


@pytest.mark.parametrize("name", ALONE)
def test_every_strategy_is_built(name):
    strategy = small_strategy(name=name, num_towers=2)
    assert (strategy.name, strategy.num_towers, strategy.step) == (name, 2, 0)


@pytest.mark.parametrize(
    "name, hint",
    [
        ("tower", "did you mean towers?"),
        ("miror", "did you mean mirrored?"),
        ("Mirrored", "did you mean mirrored?"),
        ("xyz", "use one of towers, mirrored, ring"),
        ("", "use one of towers, mirrored, ring"),
    ],
)
def test_an_unknown_name_is_refused_with_a_hint(name, hint):
    with refused(f"strategy {name!r} is unknown", hint):
        build_strategy(name, small_task(), cpus(1), StepOptions())


def test_parameter_servers_need_a_cluster():
    with refused("strategy 'ps' needs several processes", "a chief, workers and parameter servers"):
        build_strategy("ps", small_task(), cpus(1), StepOptions())


@pytest.mark.parametrize("name", ALONE)
def test_shares_that_do_not_match_the_towers_are_refused(name):
    with refused("tower_shares"):
        build_strategy(name, small_task(), cpus(2), StepOptions(), shares=(1.0, 2.0, 3.0))
