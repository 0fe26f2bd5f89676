"""Towers of several devices that gather parameters when they need them: where, and how many at a time."""

import collections
import functools
import itertools

import keras
import pytest
from keras import layers

from strategies.registry import build_strategy
from tests.towers.gathering.gathered_bytes import peak_bytes
from tests.towers.gathering.test_gathered_once import DEPTH, WIDTH, chain
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, assert_close, parameters_of, vectors
from towers.gathering.gathered_once import GatheredGraph
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.updates.schedules import Constant

LAYER = 4 * WIDTH * (WIDTH + 1)
MICROBATCHES = 2


def forked() -> TinyTask:
    """Two branches of four equal layers each."""

    def build():
        inputs = x = layers.Input((WIDTH,))
        x = layers.Dense(WIDTH, "tanh", name="stem")(x)
        ends = []
        for branch in range(2):
            y = x
            for index in range(4):
                y = layers.Dense(WIDTH, "tanh", name=f"branch_{branch}_{index}")(y)
            ends.append(y)
        return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(layers.Add(name="join")(ends)))

    return TinyTask(build=build, examples=vectors(8, WIDTH))


def trained(name: str, task: TinyTask, grid: str, **named):
    strategy = build_strategy(
        name, task, cpus_in_groups(grid, zero=3), StepOptions(schedule=Constant(0.1)), **named
    )
    strategy.run_steps(2)
    return strategy


def graph_of(strategy, tower: int) -> GatheredGraph:
    """The graph of a training tower."""
    traced = strategy.engine.towers[tower].traced
    (graph,) = traced.graphs.values()
    return graph


def uses_by_device(graph: GatheredGraph) -> dict[str, collections.Counter]:
    """For each device how many of its units gather each parameter."""
    found: dict[str, collections.Counter] = {}
    for unit in graph.units:
        found.setdefault(unit[0].device, collections.Counter()).update({use.parameter for use in unit})
    return found


@functools.cache
def trained_in(mode: str):
    """A strategy after two steps. No test changes it."""
    if mode == "pipeline":
        options = PipelineOptions(microbatches=MICROBATCHES)
        return trained("pipeline", chain(), "data:2,stage:2", pipeline=options)
    if mode == "slices":
        return trained("slices", chain(), "data:2,slice:2")
    return trained("branches", forked(), "data:2,branch:2")


# The share of a layer's parameters that a device uses.
MODES = {"pipeline": 1.0, "slices": 0.5, "branches": 1.0}


@pytest.mark.full
@pytest.mark.parametrize("name", MODES)
def test_two_units_are_alive_on_each_device_at_most(name):
    strategy, of_layer = trained_in(name), MODES[name]
    for tower, group in enumerate(strategy.engine.devices.groups):
        graph = graph_of(strategy, tower)
        assert set(uses_by_device(graph)) == set(group)
        for device, counts in uses_by_device(graph).items():
            used = sum(graph.num_bytes[parameter] for parameter in counts)
            peak = peak_bytes(graph, device)
            assert used > 3.5 * of_layer * LAYER, "or this test shows nothing"
            assert 0 < peak <= 2.2 * of_layer * LAYER, (device, peak, used)
            assert peak_bytes(graph, device, waits=False) > 3 * of_layer * LAYER


@pytest.mark.full
def test_a_device_of_a_pipeline_gathers_its_own_stage_once_for_each_microbatch_and_pass():
    graph = graph_of(trained_in("pipeline"), 1)
    first, second = (uses_by_device(graph)[f"/device:CPU:{index}"] for index in (2, 3))
    kernels = set(range(0, 2 * DEPTH, 2))
    assert set(first) & kernels and set(second) & kernels
    assert not set(first) & set(second)
    for counts in (first, second):
        for kernel in set(counts) & kernels:
            # The model's input has no gradient.
            passes = 1 if kernel == 0 else 2
            assert counts[kernel] <= passes * MICROBATCHES
    products = sum("MatMul" in node.op for node in graph.flat.graph_def.node)
    assert products == MICROBATCHES * (3 * (DEPTH + 1) - 1), "nothing is computed twice"


def test_owners_send_and_a_device_joins_what_it_uses():
    """No part of a parameter passes through a device that neither owns nor uses it."""
    strategy = trained_in("pipeline")
    owners = {
        name: {part.device for part in of_name}
        for name, of_name in itertools.groupby(strategy.engine.placement.parts, key=lambda part: part.shard.name)
    }
    names = list(strategy.engine.parameters())
    graph = graph_of(strategy, 0)
    places = {
        node.name: node.device for node in graph.flat.graph_def.node if node.name.startswith("gather_of_unit")
    }
    for number, unit in enumerate(graph.units):
        for parameter in {use.parameter for use in unit}:
            prefix = f"gather_of_unit_{number}/{parameter}"
            sent = {device for name, device in places.items() if name.startswith(f"{prefix}/part_")}
            assert sent == owners[names[parameter]]
            assert places.get(prefix, unit[0].device) == unit[0].device


@pytest.mark.full
@pytest.mark.parametrize("name", MODES)
def test_it_equals_one_device(name):
    found = trained_in(name)
    task = forked() if name == "branches" else chain()
    accumulation = MICROBATCHES if name == "pipeline" else 1
    expected = build_strategy(
        "towers", task, cpus(1), StepOptions(schedule=Constant(0.1), accumulation=accumulation)
    )
    expected.run_steps(2)
    assert_close(parameters_of(found), parameters_of(expected))
    assert found.evaluate() == pytest.approx(expected.evaluate(), rel=1e-5)
