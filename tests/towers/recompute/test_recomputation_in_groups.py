"""Towers of several devices compute activations again: the same bits, and less is kept for the backward pass."""

import collections
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from strategies.branches import branches_strategy
from strategies.pipeline import pipeline_strategy
from strategies.slices import slices_strategy
from strategies.towers import towers_strategy
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.recompute.test_recomputation import NUM_BLOCKS, residual_network
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, images, parameters_of
from towers.layers.kernels import DEFAULT_KERNELS
from towers.options import StepOptions
from towers.pipeline.action import Kind
from towers.stages.model_stages import cut_by_sizes, nodes_of
from towers.stages.options import PipelineOptions
from towers.stages.places import Place
from towers.stages.staged_passes import StagedPasses
from towers.task import Batch
from towers.timeline.activities import RECOMPUTED_SUFFIX
from towers.updates.rules import Momentum
from towers.updates.schedules import Constant


def branched_network() -> keras.Model:
    """Two blocks of two branches."""
    outputs = inputs = layers.Input((6, 6, 3))
    for _ in range(2):
        wide, small = (layers.Conv2D(4, size, padding="same", activation="relu")(outputs) for size in (3, 1))
        outputs = layers.BatchNormalization()(layers.Concatenate()([wide, small]))
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(layers.Flatten()(outputs)))


BRANCHED = TinyTask(build=branched_network, examples=images(12))
TASK = TinyTask(build=residual_network, examples=images(12))


@functools.cache
def after_two_steps(make, recompute: str):
    """The numbers after two steps, and the graphs of the steps."""
    options = StepOptions(rule=Momentum(momentum=0.9), schedule=Constant(0.05), recompute=recompute)
    strategy = make(options)
    with recorded_graphs() as graphs:
        losses = [strategy.run_steps(1).loss]
    losses.append(strategy.run_steps(1).loss)
    state = {name: variable.numpy() for name, variable in strategy.checkpointables()["state"].items()}
    return {**parameters_of(strategy), **state, "losses": np.array(losses)}, graphs


def pipeline(**options):
    pipeline = PipelineOptions(microbatches=2, **options)
    return lambda step: pipeline_strategy(TASK, cpus(2), step, pipeline=pipeline)


def slices(options: StepOptions):
    return slices_strategy(TASK, cpus_in_groups("slice:2"), options)


def branches(options: StepOptions):
    return branches_strategy(BRANCHED, cpus_in_groups("branch:2"), options)


CASES = first_quick(
    [(pipeline(), "full"), (pipeline(schedule="zb_h1"), "blocks"), (slices, "full"), (branches, "full")], 0
)


@pytest.mark.parametrize("make, recompute", CASES)
def test_a_run_gives_the_same_bits(make, recompute):
    (found, _), (expected, _) = after_two_steps(make, recompute), after_two_steps(make, "none")
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def towers(options: StepOptions):
    return towers_strategy(TASK, cpus(2), options)


def computed_again(make, recompute: str) -> dict[str, dict[str, int]]:
    """How many convolutions and norms each device computes a second time in a step."""
    _, graphs = after_two_steps(make, recompute)
    again = {node.name: node for node in graphs.nodes if node.name.endswith(RECOMPUTED_SUFFIX)}
    readers = [node for node in graphs.nodes if node.name not in again and "Grad" in node.op + node.name]
    read = {name.split(":")[0] for node in readers for name in node.input}
    assert bool(read & again.keys()) is bool(again), "the backward pass reads second results"
    # oneDNN's kernels have prefixes, and other names where a ReLU follows.
    kinds = {"convolution": r"(_\w*)?Conv2D", "norm": r"(_\w*)?FusedBatchNorm(V3|Ex)"}
    return {
        kind: collections.Counter(node.device[-5:] for node in again.values() if re.fullmatch(pattern, node.op))
        for kind, pattern in kinds.items()
    }


@pytest.mark.parametrize(
    "make, convolutions, norms",
    first_quick(
        [
            # All of two blocks' two branches but the first branch, whose input and result are alive anyway.
            (branches, {"CPU:0": 1, "CPU:1": 2}, {"CPU:0": 2}),
            (towers, {"CPU:0": NUM_BLOCKS, "CPU:1": NUM_BLOCKS}, {"CPU:0": NUM_BLOCKS, "CPU:1": NUM_BLOCKS}),
            (slices, {"CPU:0": NUM_BLOCKS, "CPU:1": NUM_BLOCKS}, {"CPU:0": NUM_BLOCKS}),
        ]
    ),
    ids=["branches", "towers", "slices"],
)
def test_each_device_computes_its_part_again(make, convolutions, norms):
    assert computed_again(make, "none") == {"convolution": {}, "norm": {}}
    assert computed_again(make, "full") == {"convolution": convolutions, "norm": norms}


def kept(recompute: str) -> set[str]:
    """The results of convolutions and activations that a stage's backward pass reads from its forward pass."""
    model = residual_network()
    first_block_and_stem = 6
    stages = cut_by_sizes(model, [first_block_and_stem, len(nodes_of(model)) - first_block_and_stem])
    schedule = PipelineOptions(stages=2, microbatches=3).schedule_for(2)
    passes = StagedPasses(TASK, model, stages, schedule, DEFAULT_KERNELS, recompute)
    images, labels = TASK.examples.features, TASK.examples.labels
    pieces = passes.training(Batch(tf.constant(images), tf.constant(labels))).pieces
    read = {name for stage in range(2) for name in pieces[Place(stage, Kind.BACKWARD)].inputs}
    return {name for name in read if name.endswith(("/convolution:0", "/Relu:0"))}


@pytest.mark.full
def test_a_stage_keeps_no_activation_from_inside_a_block():
    assert len(kept("none")) == 2 * NUM_BLOCKS
    assert kept("blocks") == set()
