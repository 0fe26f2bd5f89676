"""ZeRO over a ring's workers with towers of several devices: which device holds and sends what; the numbers."""

import collections
import functools

import pytest
import tensorflow as tf

from strategies.pipeline import StagedTowers
from strategies.registry import build_strategy
from strategies.ring.exchange.collectives import WireOptions, WorkerExchange
from strategies.ring.placements import ring_placement
from strategies.ring.zero.remote_variable import RemoteVariable
from strategies.slices import SlicedTowers
from tests.strategies.ring.threads import WorkersInThreads, rings
from tests.strategies.ring.wire_bytes import bytes_of_a_step, counted_bytes
from tests.strategies.ring.zero.test_gathered_placement import DEPTH, WIDTH, chain, collected
from tests.tiers import first_quick
from tests.towers.gathering.gathered_bytes import peak_bytes
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.table_and_matrices import task, trained
from tests.towers.tiny_tasks import assert_close, dense_task, parameters_of
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.tower import ModelVariables
from towers.updates.clipping import Clipping
from towers.updates.rules import Adam, Momentum
from towers.updates.schedules import Constant

STAGES = PipelineOptions(microbatches=2, balance=(1, 1))
STEPS = 5


def sliced_towers(task, devices, options):
    return SlicedTowers(task, devices, options, None)


def staged_towers(task, devices, options):
    return StagedTowers(task, devices, options, PipelineOptions(microbatches=2))


@functools.cache
def of_one_device(rule, clipping, steps: int) -> dict:
    return parameters_of(trained(cpus(1), rule, steps=steps, clipping=clipping))


def undivided_stages(task, devices, options):
    return StagedTowers(task, devices, options, PipelineOptions(microbatches=1))


@pytest.mark.parametrize(
    "grid, made", [("stage:2", staged_towers), ("slice:2", sliced_towers)], ids=["stage", "slice"]
)
def test_each_device_shares_its_optimizer_state_with_its_counterpart(grid, made):
    devices, model = cpus_in_groups(grid, zero=1), task().build_model()
    towers = made(task(), devices, StepOptions())
    towers.divide(model)
    held = collections.Counter()
    for rank in range(2):
        exchange = WorkerExchange(2, rank, WireOptions(), channel=1)
        placement = ring_placement(devices, exchange, towers)(ModelVariables.of(model), Adam())
        for slot, owner in placement.slots_with_owners:
            assert isinstance(slot, RemoteVariable) == (owner != rank)
            if owner == rank:
                held[slot.device[-5:], rank] += slot.dtype.size * slot.shape.num_elements()
    assert sum(held.values()) == 2 * 4 * model.count_params(), "two slots a parameter, each once in all"
    for device in ("CPU:0", "CPU:1"):
        shared = [held[device, rank] for rank in range(2)]
        assert 0 < max(shared) <= 0.6 * sum(shared), held


@pytest.mark.parametrize("zero", first_quick([2, 1]))
def test_each_device_sends_what_it_holds(monkeypatch, zero):
    """Calls of the host, as over TCP, stand in for the exchanges."""
    sizes = []

    def sent(self, vector, of_workers, purpose=""):
        assert sum(of_workers) == vector.shape.num_elements()
        sizes.append(sum(of_workers))
        return tf.ensure_shape(tf.numpy_function(lambda values: values, [vector], vector.dtype), vector.shape)

    monkeypatch.setattr(WorkerExchange, "reduce_scatter", sent)
    monkeypatch.setattr(WorkerExchange, "all_gather", sent)
    options = StepOptions(rule=Momentum(momentum=0.9), schedule=Constant(0.1), accumulation=2)
    strategy = build_strategy("ring", dense_task(), cpus_in_groups("stage:2", zero=zero), options, pipeline=STAGES)
    with recorded_graphs() as graphs:
        strategy.run_steps(1)
    # Each stage has one layer, with kernel and bias. With ZeRO-2 gradients are sent after each microbatch.
    layers = [4 * 5 + 5, 5 * 3 + 3]
    assert sizes == [*layers * zero, *layers]
    exchanged = [node.device.rpartition("device:")[2] for node in graphs.nodes if node.op == "PyFunc"]
    assert collections.Counter(exchanged) == {"CPU:0": 1 + zero, "CPU:1": 1 + zero}
    assert graphs.devices_of("ResourceApply") == {"CPU:0": 2, "CPU:1": 2}


CASES = [(1, Adam(weight_decay=0.1), Clipping(norm=0.05)), (2, Momentum(momentum=0.9), Clipping(global_norm=0.1))]


@pytest.mark.full
@pytest.mark.parametrize("zero, rule, clipping", CASES, ids=["zero 1, adamw", "zero 2, momentum"])
def test_it_equals_one_device_on_all_workers(zero, rule, clipping):
    """A table and matrices in slices, whose norms span the devices and the workers."""
    devices = cpus_in_groups("slice:2", zero=zero)
    with rings(2) as (made, _):
        found = WorkersInThreads(
            made, task(), StepOptions(rule=rule, clipping=clipping), devices=devices, make_towers=sliced_towers
        )
        found.train(STEPS)
    expected = of_one_device(rule, clipping, STEPS)
    for engine in found.engines:
        assert_close({name: variable.numpy() for name, variable in engine.parameters().items()}, expected)


@pytest.mark.parametrize(
    "grid, made",
    first_quick(
        [
            ("stage:2", undivided_stages),
            ("slice:3", sliced_towers),
            ("data:2,slice:2", sliced_towers),
        ]
    ),
    ids=["stages", "uneven slices", "towers of slices"],
)
def test_zero_3_equals_one_device_and_each_device_has_its_part(grid, made):
    rule, clipping = Adam(weight_decay=0.1), Clipping(norm=0.05)
    devices, steps = cpus_in_groups(grid, zero=3), 2
    options = StepOptions(rule=rule, clipping=clipping)
    with rings(2) as (connections, _):
        found = WorkersInThreads(connections, task(), options, devices=devices, make_towers=made)
        found.train(steps)
        values = collected(found)
    assert_close(values, of_one_device(rule, clipping, steps))
    owned = [part.variable for engine in found.engines for part in engine.placement.parts]
    # A small table has one owner.
    everywhere = {device[-5:] for device in devices.groups[0]}
    assert {one.device[-5:] for one in owned if not isinstance(one, RemoteVariable)} == everywhere
    for engine in found.engines:
        (graph,) = engine.towers[0].traced.graphs.values()
        assert {call.device[-5:] for call in graph.calls} == everywhere


@pytest.mark.full
def test_zero_3_of_slices_holds_a_part_of_each_slice_and_two_units(monkeypatch):
    """The slices are large enough to be cut. A step gathers parameters twice and sends gradients once."""
    devices = cpus_in_groups("data:2,slice:2", zero=3)
    options = StepOptions(rule=Momentum(momentum=0.9), schedule=Constant(0.1))
    with counted_bytes(monkeypatch) as sent, rings(2) as (connections, _):
        found = WorkersInThreads(connections, chain(), options, devices=devices, make_towers=sliced_towers)
        found.train(1)
        sent_by_two_towers = max(sent)
        found.train(1)
        values = collected(found)
    alone = build_strategy("towers", chain(), cpus(1), options)
    alone.run_steps(2)
    assert_close(values, parameters_of(alone))
    layer = 4 * WIDTH * (WIDTH + 1) // 2
    for engine in found.engines:
        held: collections.Counter = collections.Counter()
        for part in engine.placement.parts:
            if not isinstance(part.variable, RemoteVariable):
                held[part.device] += 4 * part.size
        assert max(held.values()) <= 0.6 * DEPTH * layer, held
        (graph,) = engine.towers[0].traced.graphs.values()
        for device in devices.groups[0]:
            assert layer * 0.9 < peak_bytes(graph, device) <= 2.4 * layer
            assert peak_bytes(graph, device, waits=False) > (DEPTH - 3) * layer, "or this test shows nothing"
    plain, zero_3 = (
        bytes_of_a_step(
            zero, chain, monkeypatch, devices=cpus_in_groups("slice:2", zero=zero), make_towers=sliced_towers
        )
        for zero in (1, 3)
    )
    assert 1.3 * plain < zero_3 < 1.55 * plain
    assert sent_by_two_towers == zero_3
