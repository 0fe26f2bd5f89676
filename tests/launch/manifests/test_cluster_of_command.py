"""The cluster that a command needs; the strategies are those of the registry."""

import pytest

from launch.manifests.cluster_of_command import OF_ONE_PROCESS, STRATEGIES, check_cluster, num_servers
from strategies.registry import cluster_kind, strategy_names
from tests.towers.user_errors import refused


def test_the_strategies_are_those_of_the_registry():
    assert tuple(name for name in strategy_names() if cluster_kind(name) == "servers") == STRATEGIES
    assert {name for name in strategy_names() if not cluster_kind(name)} == set(OF_ONE_PROCESS)


def test_the_number():
    assert num_servers(["train", "--strategy=ps"], None) == 1
    assert num_servers(["train", "--strategy", "ps"], 3) == 3
    assert num_servers(["train", "--strategy=ring"], None) == 0
    assert num_servers(["a script"], 2) == 2


@pytest.mark.parametrize(
    "command, strategy",
    [
        (["python", "-m", "launch.train"], "towers"),
        (["/venv/bin/towers-train", "--steps=3"], "towers"),
        (["towers-train", "--strategy=mirrored", "--data_dir=recipes/x"], "mirrored"),
    ],
)
def test_a_command_of_one_process_in_several(command, strategy):
    check_cluster(command, 1, "--workers=1")
    with refused("--workers=2: 2 processes, but", f"--strategy={strategy} runs in one", "--strategy=ring"):
        check_cluster(command, 2, "--workers=2")


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "launch.train", "--strategy=ring"],
        ["towers-train", "--strategy", "ps"],
        ["towers-train", "--strategy=towers", "--flagfile=some.txt"],
        ["python", "mine.py", "--strategy=mirrored"],
    ],
)
def test_a_command_that_may_have_a_cluster(command):
    check_cluster(command, 2, "--workers=2")
