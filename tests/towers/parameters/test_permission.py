"""Masks in place of a conditional: the same bits in every step, skipped ones too; no conditional in the graph."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tree
from keras import layers

from strategies.errors import NonFiniteStep
from strategies.registry import build_strategy
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, images, squared_error, stacked
from towers.options import StepOptions
from towers.task import Batch
from towers.updates import composed_rules
from towers.updates.composed_rules import Lookahead
from towers.updates.rules import SGD, Adam, Momentum, Muon, everything
from towers.updates.schedules import Constant

# Index of the batch that contains a NaN, and the number of batches.
BAD_STEP, NUM_STEPS = 2, 5


def network_with_norm() -> keras.Model:
    return stacked(
        (6, 6, 3),
        layers.Conv2D(4, 3, name="conv", kernel_constraint=keras.constraints.MaxNorm(0.7)),
        layers.BatchNormalization(name="norm"),
        layers.Flatten(name="flat"),
        layers.Dense(NUM_CLASSES, name="logits"),
    )


def images_with_nan() -> TinyTask:
    examples = images(8 * NUM_STEPS)
    examples.features[8 * BAD_STEP + 5, 1] = np.nan
    return TinyTask(build=network_with_norm, examples=examples, batch_size=8)


def table_with_nan() -> TinyTask:
    draw = np.random.default_rng(0)
    ids, labels = draw.integers(0, 9, (8 * NUM_STEPS, 3)), draw.normal(size=(8 * NUM_STEPS, 1)).astype(np.float32)
    labels[8 * BAD_STEP + 1] = np.nan

    def network():
        return stacked((3,), layers.Embedding(9, 2, name="table"), layers.Flatten(), layers.Dense(1, name="line"))

    return TinyTask(build=network, examples=Batch(ids, labels), batch_size=8, losses=squared_error)


def strategy_of(make_task, rule, *, masks: bool, mode="towers", spread=(), **options):
    # Parameters on the second CPU, not the host's: the counters are then beside them, as on a GPU.
    devices = dataclasses.replace(cpus(2, 1, **dict(spread)), masks=masks)
    step_options = StepOptions(rule=rule, schedule=Constant(0.1), **{"on_nan": "skip", **options})
    return build_strategy(mode, make_task(), devices, step_options)


def bits_of(strategy) -> dict[str, bytes]:
    """Everything that a checkpoint holds, bit by bit."""
    found = tf.nest.map_structure(lambda variable: variable.numpy().tobytes(), strategy.checkpointables())
    return {"/".join(map(str, path)): value for path, value in tree.flatten_with_path(found)}


DECAYING = Momentum(nesterov=True, weight_decay=0.01, decays=everything)
CASES = [
    (images_with_nan, DECAYING, {}),
    (table_with_nan, SGD(), {}),
    (table_with_nan, Adam(weight_decay=0.1), {"spread": (("sharded", True),)}),
    (images_with_nan, DECAYING, {"mode": "mirrored"}),
    (images_with_nan, Adam(), {"spread": (("replicated", True),)}),
    (images_with_nan, Adam(), {"spread": (("zero", 2),), "accumulation": 2}),
    (images_with_nan, Adam(), {"spread": (("zero", 3),)}),
    (images_with_nan, Lookahead(rule=Muon(), num_updates=NUM_STEPS, every=2), {"precision": "float16"}),
    (images_with_nan, Adam(), {"mode": "ring"}),
]


@pytest.mark.parametrize("make_task, rule, others", first_quick(CASES, 2))
def test_masks_give_the_bits_of_a_conditional(make_task, rule, others):
    expected, found = (strategy_of(make_task, rule, masks=masks, **others) for masks in (False, True))
    for step in range(NUM_STEPS):
        before = bits_of(found)
        reports = [strategy.run_steps(1) for strategy in (expected, found)]
        assert bits_of(found) == bits_of(expected), f"step {step}"
        assert reports[1].skipped == reports[0].skipped == (step == BAD_STEP)
        if step == BAD_STEP:
            changed = {name for name, value in bits_of(found).items() if value != before[name]}
            assert {name.partition("/")[0] for name in changed} == {"counters"}


@pytest.mark.full
def test_masks_stop_at_the_bad_step():
    expected, found = (
        strategy_of(images_with_nan, DECAYING, masks=masks, on_nan="stop") for masks in (False, True)
    )
    for counts in ([1] * NUM_STEPS, [NUM_STEPS]):
        messages = []
        for strategy in (expected, found):
            strategy.checkpointables()["counters"]["step"].assign(0)
            strategy.restored()
            with pytest.raises(NonFiniteStep) as caught:
                for count in counts:
                    strategy.run_steps(count)
            assert caught.value.step == BAD_STEP
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
        assert bits_of(found) == bits_of(expected)
    # Counters set to an earlier step, as by a checkpoint: seeds and batches continue from there.
    for strategy in (expected, found):
        strategy.checkpointables()["counters"]["step"].assign(BAD_STEP + 1)
        strategy.restored()
    assert found.run_steps(2).loss == expected.run_steps(2).loss
    assert bits_of(found) == bits_of(expected)


# Operations for which a GPU waits, because the host decides or computes.
OF_THE_HOST = {"If", "StatelessIf", "Case", "While", "StatelessWhile", "PyFunc", "PyFuncStateless", "EagerPyFunc"}


@functools.cache
def graph_of(mode: str, masks: bool) -> tf.Graph:
    return strategy_of(images_with_nan, DECAYING, masks=masks, mode=mode).graph()


@pytest.mark.parametrize("mode", first_quick(["towers", "mirrored", "ring"]))
def test_a_masked_step_asks_the_host_for_nothing(mode):
    found = {}
    for masks in (False, True):
        described = graph_of(mode, masks).as_graph_def()
        nodes = [*described.node, *(node for one in described.library.function for node in one.node_def)]
        found[masks] = {node.op for node in nodes} & OF_THE_HOST
    assert found[False] and not found[True]


def test_masks_are_on_the_device_of_what_they_select():
    """A mask without a device would be on the first GPU, even if the state is on another one."""
    graph = graph_of("towers", True)
    masks = [one for one in graph.get_operations() if one.type == "SelectV2" and "update" in one.name]
    assert len(masks) > 2 and {one.device.rpartition("/")[2] for one in masks} == {"device:CPU:1"}


@pytest.mark.full
def test_lookahead_without_a_conditional(monkeypatch):
    rule = Lookahead(rule=SGD(), num_updates=6, every=2)
    numbers = []
    for on_gpu in (False, True):
        monkeypatch.setattr(composed_rules, "is_gpu", lambda device, on_gpu=on_gpu: on_gpu)
        strategy = strategy_of(table_with_nan, rule, masks=on_gpu)
        strategy.run_steps(4)
        numbers.append(bits_of(strategy))
    assert numbers[0] == numbers[1]
