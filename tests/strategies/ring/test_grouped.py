"""Towers of several devices on a ring: where gradients are exchanged, one cut for all workers, what is refused."""

import collections
import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from strategies.branches import BranchedTowers
from strategies.engines import OWN
from strategies.pipeline import StagedTowers
from strategies.registry import build_strategy
from strategies.ring.exchange.collectives import WireOptions, WorkerExchange
from strategies.ring.exchange.joining import Ring, RingOptions
from strategies.ring.grouped import decided_by_first, grouped_towers_of, kind_of
from strategies.slices import SlicedTowers, SliceOptions
from tests.strategies.small_task import small_task
from tests.towers.branches.branched_networks import small_inception
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.tiny_tasks import TinyTask, assert_close, dense_task, images, parameters_of
from tests.towers.user_errors import refused
from towers.branches.options import BranchOptions
from towers.grid import STAGE
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.updates.rules import Momentum
from towers.updates.schedules import Constant

STAGES = PipelineOptions(microbatches=2, balance=(1, 1))


def ring_strategy(grid="stage:2", ring=None, **of_towers):
    options = StepOptions(rule=Momentum(momentum=0.9), schedule=Constant(0.1))
    return build_strategy("ring", dense_task(), cpus_in_groups(grid), options, ring=ring, **of_towers)


def branched_task() -> TinyTask:
    return TinyTask(build=small_inception, examples=images(9), batch_size=5)


@pytest.fixture
def sent_sizes(monkeypatch) -> list[int]:
    """The number of elements in each exchange of gradients, replaced by a call of the host, as over TCP."""
    sizes = []

    def sum_gradients(self, own):
        sizes.append(sum(gradient.shape.num_elements() for gradient in own))
        flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in own], 0)
        sent = tf.numpy_function(lambda values: values, [flat], flat.dtype)
        parts = tf.split(tf.ensure_shape(sent, flat.shape), [gradient.shape.num_elements() for gradient in own])
        return [tf.reshape(part, gradient.shape) for part, gradient in zip(parts, own, strict=True)]

    monkeypatch.setattr(WorkerExchange, "sum_gradients", sum_gradients)
    return sizes


def devices_of_exchanges(graphs) -> list[str]:
    """Devices of the exchanges, sorted. The step's clock is no PyFunc but PyFuncStateless."""
    return sorted(node.device.rpartition("device:")[2] for node in graphs.nodes if node.op == "PyFunc")


def test_each_stage_computes_exchanges_and_updates_on_its_device(sent_sizes):
    strategy = ring_strategy(pipeline=STAGES)
    with recorded_graphs() as graphs:
        strategy.run_steps(1)
    on_each = {"CPU:0", "CPU:1"}
    # Each stage sends the kernel and bias of its layer.
    assert sent_sizes == [4 * 5 + 5, 5 * 3 + 3]
    assert devices_of_exchanges(graphs) == ["CPU:0", "CPU:1"]
    for kind in ("MatMul", "ResourceApply"):
        assert graphs.devices_of(kind).keys() == on_each, kind
    assert graphs.devices_of("ResourceApply") == {"CPU:0": 2, "CPU:1": 2}


@pytest.mark.full
def test_each_branch_exchanges_and_updates_on_its_device(sent_sizes):
    devices, options = cpus_in_groups("branch:3"), StepOptions(rule=Momentum(momentum=0.9))
    strategy = build_strategy("ring", branched_task(), devices, options, branches=BranchOptions())
    with recorded_graphs() as graphs:
        strategy.run_steps(1)
    homes = [variable.device.rpartition("device:")[2] for variable in strategy.engine.parameters().values()]
    assert min(homes.count(f"CPU:{index}") for index in range(3)) > 5
    assert graphs.devices_of("ResourceApply") == collections.Counter(homes)
    assert devices_of_exchanges(graphs) == ["CPU:0", "CPU:1", "CPU:2"]
    assert sum(sent_sizes) == sum(math.prod(v.shape) for v in strategy.engine.parameters().values())


@pytest.mark.full
def test_microbatches_of_pipelines_within_those_of_accumulation():
    """Every fifth batch has 5 examples for 4 microbatches of 2 towers."""
    options = StepOptions(
        rule=Momentum(momentum=0.9), schedule=Constant(0.05), accumulation=2, precision="float64"
    )
    devices = cpus_in_groups("data:2,stage:2")
    found = build_strategy("ring", small_task(), devices, options, pipeline=PipelineOptions(microbatches=2))
    options = dataclasses.replace(options, accumulation=found.microbatches)
    expected = build_strategy("towers", small_task(), cpus(1), options)
    assert found.run_steps(6).examples == expected.run_steps(6).examples
    assert found.microbatches == 4
    assert_close(parameters_of(found), parameters_of(expected))


def test_the_only_microbatch_of_a_pipeline_comes_to_its_devices_before_the_step():
    def trained(devices):
        options = StepOptions(rule=Momentum(momentum=0.9), schedule=Constant(0.1))
        strategy = build_strategy("ring", dense_task(), devices, options, pipeline=PipelineOptions(microbatches=1))
        strategy.run_steps(2)
        return parameters_of(strategy)

    devices = cpus_in_groups("stage:2")
    assert_close(trained(dataclasses.replace(devices, input_on_towers=True)), trained(devices))


def test_the_engine_and_why():
    strategy = ring_strategy("slice:2", slices=SliceOptions())
    assert strategy.engine_choice.name == OWN
    assert "cannot serve towers of 2 devices" in strategy.notices[0]


class Row:
    """Stands in for the `HostExchange` of worker `rank`; the first worker sends `numbers`."""

    def __init__(self, rank: int, numbers: list[int]):
        self.rank, self._numbers = rank, numbers
        self.gathered: list[list[float]] = []

    def gather(self, purpose, own):
        self.gathered.append(list(own))
        first = [len(self._numbers)] if purpose.startswith("number of") else self._numbers
        assert self.rank > 0 or list(own) == first
        assert len(own) == len(first), "all workers send equally many"
        return np.array([first, own], np.float64)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_worker_decides_for_all(rank):
    """Each worker would measure different numbers, but all must cut the model in the same way."""
    measured = []

    def measure():
        measured.append(rank)
        return [5, 3]

    assert decided_by_first(Row(rank, [5, 3]))(measure) == [5, 3]
    assert measured == [0] * (rank == 0)


def test_a_cut_by_time():
    strategy = ring_strategy(pipeline=dataclasses.replace(STAGES, balance="time"))
    assert strategy.run_steps(1).step == 1


@pytest.mark.parametrize(
    "named, parts",
    [
        ({}, ("towers of several devices with strategy 'ring'", "pass pipeline=")),
        (
            {"pipeline": STAGES, "slices": SliceOptions()},
            ("pipeline= and slices= with strategy 'ring'", "omit all but one"),
        ),
        (
            {"pipeline": STAGES, "ring": Ring.alone(RingOptions(engine="tensorflow"))},
            ("engine='tensorflow'", "cannot serve towers of 2 devices", "use engine='auto'"),
        ),
        (
            {"pipeline": STAGES, "ring": Ring.alone(RingOptions(wire=WireOptions(algorithm="nccl")))},
            ("all_reduce='nccl' with towers of several devices", "all_reduce='tcp'"),
        ),
        ({"pipeline": PipelineOptions(microbatches=16)}, ("microbatches=16, num_towers=1 and a batch of 8",)),
        ({"branches": BranchOptions()}, ("has no branches", "strategy='towers', or a ring without a grid")),
    ],
    ids=["neither", "both", "engine", "all_reduce", "microbatches", "branches"],
)
def test_what_is_refused(named, parts):
    with refused(*parts):
        ring_strategy(**named)


def test_towers_on_gpus_are_refused():
    devices = dataclasses.replace(cpus_in_groups("stage:2"), parameters="/device:GPU:0")
    with refused(
        "GPUs with towers of several devices on a ring",
        "over TCP; use tower_device='cpu', or towers of one device",
    ):
        grouped_towers_of(dense_task(), devices, StepOptions(), WireOptions(), {STAGE: STAGES})


def test_workers_with_other_towers_are_told_apart():
    made = [
        StagedTowers(dense_task(), cpus_in_groups("stage:2"), StepOptions(), STAGES),
        SlicedTowers(dense_task(), cpus_in_groups("slice:2"), StepOptions(), None),
        SlicedTowers(dense_task(), cpus_in_groups("slice:3"), StepOptions(), None),
        BranchedTowers(dense_task(), cpus_in_groups("branch:2"), StepOptions(), None),
    ]
    assert len({kind_of(towers) for towers in [None, *made]}) == 5


@pytest.mark.full
def test_branches_are_divided_by_the_times_of_the_first_worker():
    task, of_plans = branched_task(), []
    options = StepOptions(rule=Momentum(momentum=0.9))
    for reverse in (False, True):
        towers = BranchedTowers(task, cpus_in_groups("branch:3"), options, BranchOptions(balance="time"))

        def decided(measure, reverse=reverse):
            return sorted(range(1, len(measure()) + 1), reverse=reverse)

        towers.divide(task.build_model(), decided)
        of_plans.append([one.costs for one in towers.plan.blocks])
    assert towers.plan.is_measured
    assert of_plans[0] != of_plans[1]


def test_pipelines_refuse_synced_statistics_over_the_towers_of_all_workers():
    with refused("batch_stats='synced' with a pipeline of 2 towers"):
        options = StepOptions(batch_stats="synced")
        build_strategy("ring", dense_task(), cpus_in_groups("data:2,stage:2"), options, pipeline=STAGES)


def test_a_device_alone_is_no_group():
    assert build_strategy("ring", dense_task(), cpus(1), StepOptions()).microbatches == 1
