"""Strategies by name."""

import dataclasses

import numpy as np
import pytest

from strategies.registry import ON_REQUEST, build_strategy, cluster_kind, divides, strategy_names
from strategies.ring.exchange.joining import Ring, RingOptions
from strategies.slices import SliceOptions
from tests.strategies.small_task import small_strategy, small_task
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import TinyTask, dense_network, vectors
from tests.towers.user_errors import refused
from towers.branches.options import BranchOptions
from towers.options import StepOptions
from towers.stages.options import PipelineOptions

# A single process can't build a strategy with parameter servers. Some strategies have towers of several devices.
GROUPED = [name for name in strategy_names() if divides(name) not in ("", ON_REQUEST)]
ALONE = [name for name in strategy_names() if cluster_kind(name) != "servers" and name not in GROUPED]


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


@pytest.mark.parametrize(
    "changed, parts",
    [
        ({"name": None}, ("strategy None is unknown", "use one of towers")),
        ({"task": dense_network()}, ("task is a keras.src", "must be a towers.task.Task", "OwnTask(model=")),
        ({"task": TinyTask}, ("task is the class", "must be a towers.task.Task")),
        ({"devices": ["cpu:0"]}, ("devices is a list", "configure_devices()")),
        ({"options": {}}, ("options is a dict", "StepOptions.of_keras(optimizer)")),
        ({"pipeline": "1f1b"}, ("pipeline is a str", "PipelineOptions(...)")),
        ({"shares": "1,2"}, ("shares='1,2'", "a list of numbers")),
    ],
)
def test_an_argument_of_another_type_is_refused(changed, parts):
    given = {"name": "towers", "task": small_task(), "devices": cpus(2), "options": StepOptions()} | changed
    with refused(*parts):
        build_strategy(given.pop("name"), given.pop("task"), given.pop("devices"), given.pop("options"), **given)


@pytest.mark.parametrize(
    "name, given, able",
    [
        ("towers", {"pipeline": PipelineOptions(microbatches=4)}, "'ring' or 'pipeline'"),
        ("pipeline", {"slices": SliceOptions()}, "'ring' or 'slices'"),
        ("mirrored", {"branches": BranchOptions()}, "'ring' or 'branches'"),
        ("slices", {"ring": Ring.alone(RingOptions())}, "only 'ring' can; use that"),
    ],
)
def test_an_argument_of_another_strategy_is_refused(name, given, able):
    """If the argument were ignored, the run would be of another kind than its caller wants."""
    (argument,) = given
    with refused(f"{argument}=... with strategy {name!r}", able, f"omit {argument}"):
        build_strategy(name, small_task(), cpus(2), StepOptions(), **given)


@pytest.mark.parametrize(
    "given, parts",
    [
        ({"rule": "sgd"}, ("rule='sgd'", "a rule of towers.updates.rules")),
        ({"clipping": 1.0}, ("clipping is a float", "Clipping(norm=1.0)")),
        ({"precision": ["float32"]}, ("precision=['float32'] is unknown",)),
    ],
)
def test_an_option_of_another_type_is_refused(given, parts):
    with refused(*parts):
        StepOptions(**given)


def test_a_seed_may_be_a_numpy_integer():
    """Keras itself refuses NumPy integers."""
    assert build_strategy("towers", small_task(), cpus(1), StepOptions(seed=np.int64(4))).step == 0


def test_parameter_servers_need_a_cluster():
    with refused("strategy 'ps' needs several processes", "a chief, workers and parameter servers"):
        build_strategy("ps", small_task(), cpus(1), StepOptions())


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("batch_size, accumulation, count", [(64, 1, 2), (130, 1, 4), (8, 1, 1), (128, 2, 2)])
def test_default_towers_get_32_examples_each(name, batch_size, accumulation, count):
    devices = dataclasses.replace(cpus(4), threads_per_tower=1, default_of_cores=4)
    options = StepOptions(accumulation=accumulation)
    task = TinyTask(build=dense_network, examples=vectors(batch_size), batch_size=batch_size)
    strategy = build_strategy(name, task, devices, options)
    assert strategy.num_towers == count
    assert any(f"{count} tower" in notice and "instead of 4" in notice for notice in strategy.notices) == (
        count < 4
    )


def test_shares_keep_the_default_towers():
    devices = dataclasses.replace(cpus(4), threads_per_tower=1, default_of_cores=4)
    strategy = build_strategy("towers", small_task(), devices, StepOptions(), shares=(1.0, 2.0, 1.0, 1.0))
    assert strategy.num_towers == 4


@pytest.mark.parametrize("name", ALONE)
def test_shares_that_do_not_match_the_towers_are_refused(name):
    with refused("tower_shares"):
        build_strategy(name, small_task(), cpus(2), StepOptions(), shares=(1.0, 2.0, 3.0))
