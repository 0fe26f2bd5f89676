"""Concurrent pushes of real processes: each is applied and counted exactly once."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from launch.membership.tf_config import cluster_from
from strategies.cluster import CHIEF, SERVER, Cluster
from strategies.registry import build_strategy
from strategies.servers.own.connections.group import Group
from strategies.servers.own.key_value import KeyValueStore
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions
from tests.launch.server_groups import ServerGroup
from tests.strategies.servers import exactness_program as program
from tests.strategies.small_task import small_task
from tests.towers.logical_cpus import cpus
from towers.updates.rules import SGD, Adam, Momentum, UpdateRule

pytestmark = [pytest.mark.timeout(200), pytest.mark.full]

LIMIT_SECONDS = 100


@dataclasses.dataclass(frozen=True)
class Pushed:
    """A key after all pushes.

    Attributes:
      key: name of the key.
      value: value of the key.
      slots: the slots, joined from the servers' pieces.
      versions: the vector's version on each server.
      of_others: for each worker, the largest number of other workers' updates between two of its own.
    """

    key: str
    value: np.ndarray
    slots: dict[str, np.ndarray]
    versions: list[int]
    of_others: list[float]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[dict[str, list[Pushed]], Mapping]:
    """Ten keys, one after another, for each rule; and the summary of a run. This process is the chief."""
    command = ["-m", "tests.strategies.servers.exactness_program"]
    counts = {"workers": program.NUM_WORKERS, "servers": program.NUM_SERVERS}
    with ServerGroup(command, **counts, missing=["chief:0"], with_this_process=True) as group:
        task = {"cluster": group.cluster, "task": {"type": CHIEF, "index": 0}}
        cluster = cluster_from(json.dumps(task))
        pushed = {
            name: pushed_by_all(program.group_of(cluster.members(SERVER), cluster.this), rule)
            for name, rule in program.RULES.items()
        }
        summary = trained(cluster, tmp_path_factory.mktemp("trained") / "run")
        for name, ended in group.ends(LIMIT_SECONDS).items():
            assert ended.code == 0, (name, ended.err)
    return pushed, summary


@pytest.fixture
def pushed(found):
    return found[0]


@pytest.fixture
def summary(found):
    return found[1]


def pushed_by_all(group: Group, rule: UpdateRule) -> list[Pushed]:
    """The results of one rule, key by key."""
    values = KeyValueStore(group)
    found = []
    for key in program.KEYS:
        values.init(key, program.value_of(key))
        done = [program.done_key(key, rank) for rank in range(program.NUM_WORKERS)]
        of_others = [float(value[0]) for value in program.pulled_when_there(values, done).values()]
        replies = group.ask_all("pull", key=key)
        versions = [reply["version"] for reply, _ in replies]
        lengths = [len(piece) for _, (piece,) in replies]
        slots = {name: slot_of(group, key, name, lengths) for name in rule.slot_names}
        found.append(Pushed(key, values.pull([key])[key], slots, versions, of_others))
    group.ask_all("end", how="done")
    values.init(program.OVER, np.zeros(1))
    group.close()
    return found


def slot_of(group: Group, key: str, name: str, lengths: Sequence[int]) -> np.ndarray:
    """A slot of a key, joined from the servers' pieces of these lengths."""
    pieces = [
        group.ask(server, "read_part", key=key, table=None, slot=name, begin=0, end=length)[1][0]
        for server, length in enumerate(lengths)
    ]
    return np.concatenate(pieces).reshape(program.SHAPE)


def trained(cluster: Cluster, directory: pathlib.Path) -> Mapping:
    """The summary of an asynchronous run with evaluations and checkpoints."""
    strategy = build_strategy(
        "ps", small_task(), cpus(1), program.step_options(), servers=program.membership_of(cluster)
    )
    options = TrainerOptions(
        steps=program.TRAINED_STEPS,
        directory=directory,
        checkpoint_every_steps=50,
        evaluate_every_steps=100,
        evaluate_every_epochs=None,
        report_every_steps=7,
    )
    return Trainer(strategy, options).fit().summary


def one_by_one(rule: UpdateRule, key: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Value and slots after the same number of updates, one after another, in float64."""
    value, gradient = (drawn(key).astype(np.float64) for drawn in (program.value_of, program.gradient_of))
    rate = np.float64(np.float32(program.RATE))
    slots = {name: np.zeros(program.SHAPE) for name in rule.slot_names}
    for update in range(1, program.NUM_PUSHES + 1):
        value = value * (1 - rate * rule.weight_decay)
        value, slots = STEPS[type(rule)](rule, value, slots, gradient, rate, update)
    return value, slots


def sgd_step(rule, value, slots, gradient, rate, update):
    return value - rate * gradient, slots


def momentum_step(rule, value, slots, gradient, rate, update):
    momentum = np.float64(np.float32(rule.momentum))
    velocity = momentum * slots["momentum"] - rate * gradient
    change = momentum * velocity - rate * gradient if rule.nesterov else velocity
    return value + change, {"momentum": velocity}


def adam_step(rule, value, slots, gradient, rate, update):
    beta_1, beta_2 = (np.float64(np.float32(beta)) for beta in (rule.beta_1, rule.beta_2))
    first = beta_1 * slots["first_moment"] + (1 - beta_1) * gradient
    second = beta_2 * slots["second_moment"] + (1 - beta_2) * gradient**2
    rate = rate * np.sqrt(1 - beta_2**update) / (1 - beta_1**update)
    return value - rate * first / (np.sqrt(second) + rule.epsilon), {
        "first_moment": first,
        "second_moment": second,
    }


STEPS = {SGD: sgd_step, Momentum: momentum_step, Adam: adam_step}

every_rule = pytest.mark.parametrize("rule", program.RULES)


@every_rule
def test_every_push_is_applied_once_on_every_server(pushed, rule):
    for found in pushed[rule]:
        assert found.versions == [program.NUM_PUSHES] * program.NUM_SERVERS, found.key


@every_rule
def test_values_and_slots_equal_those_of_sequential_pushes(pushed, rule):
    for found in pushed[rule]:
        value, slots = one_by_one(program.RULES[rule], found.key)
        # Where terms cancel, the error is relative to the largest intermediate values.
        np.testing.assert_allclose(found.value, value, rtol=1e-5, atol=1e-5, err_msg=found.key)
        assert found.slots.keys() == slots.keys()
        for name, slot in slots.items():
            np.testing.assert_allclose(found.slots[name], slot, rtol=1e-5, err_msg=f"{name} of {found.key}")


@every_rule
def test_the_pushes_were_concurrent(pushed, rule):
    """Otherwise the other tests would show nothing: each worker must see updates of others between its own."""
    of_others = np.array([found.of_others for found in pushed[rule]])
    assert np.all(of_others.max(0) > 0), of_others


def test_a_run_counts_its_pushes(summary):
    """The run has the requested number of steps, and each server counts as many pushes."""
    steps, figures = program.TRAINED_STEPS, summary["parameter_servers"]
    assert summary["steps"] == steps
    assert [server["pushes"] for server in figures["servers"].values()] == [steps] * program.NUM_SERVERS
    assert sum(worker["steps"] for worker in figures["workers"].values()) == steps
    assert sum(figures["staleness"]["histogram"].values()) == steps
    assert figures["staleness"]["max"] > 0, "the pushes were concurrent"
