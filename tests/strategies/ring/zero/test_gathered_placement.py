"""ZeRO-3 over workers in threads: one device's numbers, what a worker holds, and what it sends."""

import functools

import pytest
import tensorflow as tf
from keras import layers

from strategies.ring.zero.remote_variable import RemoteVariable
from strategies.ring.zero.zero_slots import bring, release
from tests.strategies.ring.threads import WorkersInThreads, at_once
from tests.strategies.ring.wire_bytes import bytes_of_a_step
from tests.strategies.ring.zero.test_zero_placement import RULES, STEPS, values_of, workers
from tests.tiers import first_quick
from tests.towers.gathering.gathered_bytes import peak_bytes
from tests.towers.logical_cpus import cpus
from tests.towers.table_and_matrices import trained
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, assert_close, parameters_of, stacked, vectors
from towers.timeline.activities import activity_of
from towers.tracing.flat_graph import node_of
from towers.updates.clipping import Clipping
from towers.updates.rules import Adam, Muon

WIDTH, DEPTH = 64, 6
CLIPPINGS = {"adamw": Clipping(global_norm=0.1), "muon": Clipping(), "lookahead": Clipping(norm=0.05)}


def chain() -> TinyTask:
    """Six equal layers and a small one."""

    def build():
        equal = [layers.Dense(WIDTH, "tanh", name=f"dense_{index}") for index in range(DEPTH)]
        return stacked((WIDTH,), *equal, layers.Dense(NUM_CLASSES, name="logits"))

    return TinyTask(build=build, examples=vectors(8, WIDTH))


@functools.cache
def workers_of_chain(num_workers: int, num_towers: int) -> WorkersInThreads:
    """Workers that have not trained and can't, because their connections are closed."""
    devices = cpus(num_towers, zero=3)
    with workers(Adam(), devices=devices, task=chain, num_workers=num_workers) as found:
        return found


def collected(found) -> dict:
    """The parameters as collected by the worker that writes checkpoints."""
    spread = [engine.placement.spread_with_owners for engine in found.engines]
    at_once(found.hosts, lambda host, rank: bring(host, spread[rank]))
    values = values_of(found.engines[0])
    release(spread[0])
    return values


@pytest.mark.parametrize("rule", first_quick(CLIPPINGS))
def test_it_equals_one_device(rule):
    clipping = CLIPPINGS[rule]
    with workers(RULES[rule], zero=3, clipping=clipping) as found:
        found.train(STEPS)
        values = collected(found)
    assert_close(values, parameters_of(trained(cpus(1), RULES[rule], steps=STEPS, clipping=clipping)))


@pytest.mark.full
def test_workers_with_other_numbers_of_towers_equal_one_device():
    rule, clipping = RULES["adamw"], CLIPPINGS["adamw"]
    devices = [cpus(number, zero=3) for number in (2, 1)]
    with workers(rule, clipping=clipping, devices=devices) as found:
        found.train(STEPS)
        values = collected(found)
        calls = [[(call.unit, call.parameters) for call in graph.calls] for graph in found.graphs]
    assert_close(values, parameters_of(trained(cpus(1), rule, steps=STEPS, clipping=clipping)))
    assert calls[0] == calls[1]


def bytes_held(variables, kind) -> int:
    return sum(
        variable.dtype.size * variable.shape.num_elements()
        for variable, _ in variables
        if isinstance(variable, kind)
    )


@pytest.mark.full
@pytest.mark.parametrize("num_workers, num_towers", [(2, 2), (3, 1)])
def test_a_worker_holds_its_part_and_two_units_and_gradients_leave_early(num_workers, num_towers):
    found, device = workers_of_chain(num_workers, num_towers), cpus(num_towers).towers[0]
    parameters = found.engines[0].parameters().values()
    total = sum(variable.dtype.size * variable.shape.num_elements() for variable in parameters)
    layer = 4 * WIDTH * (WIDTH + 1)
    for engine in found.engines:
        parameters = engine.placement.parameters_with_owners
        held = bytes_held(parameters, tf.Variable)
        assert held + bytes_held(parameters, RemoteVariable) == total
        assert held <= 1.1 * total / num_workers
        assert bytes_held(engine.placement.slots_with_owners, tf.Variable) == 2 * held
        assert f"{held:,} on worker" in engine.notices[-1]
    for graph in found.graphs:
        assert layer < peak_bytes(graph, device) <= 2.2 * layer
        assert peak_bytes(graph, device, waits=False) > (DEPTH - 2) * layer, "or this test shows nothing"
    calls = [graph.calls for graph in found.graphs]
    assert calls == [calls[0]] * num_workers
    leaves = [call.unit is None for call in calls[0]]
    assert leaves[leaves.index(True) :].count(False) >= DEPTH - 3, "most gathers follow the first gradients"


@pytest.mark.full
def test_towers_of_a_worker_wait_for_calls_and_never_for_each_other():
    (graph, *_) = workers_of_chain(2, 2).graphs
    scopes = {node.name: towers_of(node.name) for node in graph.flat.graph_def.node}
    for tower, device in enumerate(cpus(2).towers):
        own = [node for node in graph.flat.graph_def.node if scopes[node.name] == {tower}]
        assert sum("MatMul" in node.op for node in own) == 3 * (DEPTH + 1) - 1, "its whole computation"
        assert {node.device for node in own} == {device}
        sources = {node_of(source) for node in own for source in node.input}
        assert {other for source in sources for other in scopes[source]} == {tower}


def towers_of(name: str) -> set[int]:
    """The tower that computes an operation, as a set; empty for a call that serves all towers."""
    tower = activity_of(name).tower
    return set() if tower is None else {tower}


@pytest.mark.full
def test_a_step_sends_gathers_twice_and_gradients_once(monkeypatch):
    plain, zero_3 = (bytes_of_a_step(zero, chain, monkeypatch) for zero in (1, 3))
    # The first layer is gathered once, because its input has no gradient, and the last large one, because its
    # backward pass is in the unit of its forward pass.
    assert 1.3 * plain < zero_3 < 1.5 * plain
    assert bytes_of_a_step(3, chain, monkeypatch, devices=cpus(2, zero=3)) == zero_3, (
        "whatever the number of towers"
    )


@pytest.mark.full
def test_a_worker_may_own_nothing():
    """Muon needs whole matrices, and there is one."""

    def one_matrix() -> TinyTask:
        return TinyTask(
            build=lambda: stacked((4,), layers.Dense(NUM_CLASSES, use_bias=False, name="only")),
            examples=vectors(8),
        )

    for clipping in (Clipping(norm=0.01), Clipping(global_norm=0.01)):
        with workers(Muon(), zero=3, task=one_matrix, clipping=clipping) as found:
            found.train(2)
            assert {part.shard.owner for part in found.engines[0].placement.parts} == {0}
            assert isinstance(found.engines[1].placement.parts[0].variable, RemoteVariable)
