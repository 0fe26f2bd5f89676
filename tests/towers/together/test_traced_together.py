"""Towers in one graph: what they sum, what each takes and returns, and that nothing else is exchanged."""

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from strategies.registry import build_strategy
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, images, parameters_of, stacked
from towers.exchange import TowerExchange
from towers.options import StepOptions
from towers.owners import Copies, Slices
from towers.per_tower import PerTower, of_tower
from towers.task import Batch
from towers.together.traced_together import TracedTogether
from towers.tower import TowerResult

DEVICES = ("/device:CPU:0", "/device:CPU:1", "/device:CPU:2")


def together(function) -> TracedTogether:
    return TracedTogether(function, devices=DEVICES)


def result_of(loss_sum, gradients=()) -> TowerResult:
    return TowerResult(loss_sum, tf.constant(1.0), list(gradients), {}, {})


def batches(*lengths) -> PerTower:
    """Features 0, 1, 2, ..., continued from one tower to the next."""
    features = np.split(np.arange(sum(lengths), dtype=np.float32), np.cumsum(lengths)[:-1])
    return PerTower([Batch(tf.constant(own), tf.zeros([len(own)], tf.int32)) for own in features])


def test_each_tower_gets_the_sum_over_all():
    exchange = TowerExchange(3)

    def tower(parameters, state, batch):
        return result_of(parameters[0] * exchange.sum(tf.reduce_sum(batch.features)))

    traced = together(tower)
    for lengths in ((3, 2, 1), (1, 1, 1), (4, 4, 1)):
        factors = Copies([tf.constant(factor) for factor in (1.0, 2.0, 3.0)])
        found = traced([factors], [], batches(*lengths))
        total = sum(range(sum(lengths)))
        assert [float(one) for one in found.loss_sum.values] == [total, 2 * total, 3 * total]
    assert len(traced._graphs) == 1


def test_a_second_sum_takes_what_the_first_gave():
    """The sums have the same order on all towers, so that all towers have the same bits."""
    exchange = TowerExchange(3)

    def tower(parameters, state, batch):
        first = exchange.sum(tf.reduce_sum(batch.features))
        return result_of(exchange.sum(first * tf.reduce_max(batch.features)))

    found = together(tower)([], [], batches(2, 2, 2)).loss_sum.values
    assert [float(one) for one in found] == [15.0 * (1 + 3 + 5)] * 3


def test_a_sum_in_a_branch_stays_a_collective():
    """The sum is in a function that the graph calls, and finds the other towers' sums by its keys."""
    exchange = TowerExchange(3)

    def tower(parameters, state, batch):
        total = exchange.sum(tf.reduce_sum(batch.features))
        return result_of(tf.cond(total > 0, lambda: exchange.sum(total), lambda: total))

    found = together(tower)([], [], batches(1, 1, 1)).loss_sum.values
    assert [float(one) for one in found] == [9.0] * 3


def test_gradients_and_sliced_parameters():
    """Each element of a list has a value for each tower; slices are joined for each tower."""

    def tower(parameters, state, batch):
        (whole,) = parameters
        return result_of(tf.reduce_sum(whole), [whole * batch.features[0], tf.IndexedSlices(whole, tf.range(4))])

    sliced = Slices([tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])], 0)
    found = together(tower)([sliced], [], batches(1, 1, 1))
    for index in range(3):
        dense, sparse = of_tower(found.gradients, index)
        np.testing.assert_array_equal(dense, index * np.array([1.0, 2.0, 3.0, 4.0]))
        np.testing.assert_array_equal(sparse.values, [1.0, 2.0, 3.0, 4.0])


def test_each_tower_is_on_its_device():
    def tower(parameters, state, batch):
        return result_of(tf.reduce_sum(tf.square(batch.features), name="of_tower"))

    with recorded_graphs() as graphs:
        together(tower)([], [], batches(1, 1, 1))
    placed = {node.device for node in graphs.nodes if node.op == "Square"}
    assert {name[-len(DEVICES[0]) :] for name in placed} == set(DEVICES)


@pytest.mark.parametrize("batch_stats, is_together", first_quick([("synced", True), ("average", False)]))
def test_towers_with_synced_statistics_exchange_no_collective(batch_stats, is_together):
    def build():
        norm = layers.BatchNormalization()
        return stacked((6, 6, 3), layers.Conv2D(4, 3), norm, layers.Flatten(), layers.Dense(NUM_CLASSES))

    task = TinyTask(build=build, examples=images(21), batch_size=7)
    strategy = build_strategy("towers", task, cpus(3), StepOptions(batch_stats=batch_stats))
    before = parameters_of(strategy)
    with recorded_graphs() as graphs:
        strategy.run_steps(2)
    assert not any(node.op.startswith("Collective") for node in graphs.nodes)
    assert isinstance(strategy.engine.tower.traced, TracedTogether) == is_together
    after = parameters_of(strategy)
    assert any(np.any(after[name] != value) for name, value in before.items())
