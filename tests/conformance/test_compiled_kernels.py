"""Each mode of one process with the kernels that a CPU with AVX2 alone gets, on layers large enough for them.

The rows of the table train networks that are too small for these kernels, and in float64.
"""

import dataclasses

import keras
import numpy as np
import pytest
from keras import layers

from strategies.branches import branches_strategy
from strategies.distribute.mirrored import mirrored_strategy
from strategies.pipeline import pipeline_strategy
from strategies.slices import slices_strategy
from strategies.towers import towers_strategy
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, assert_close, parameters_of
from towers.hardware.cpu_kernels import runs_onednn
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.task import Batch
from towers.updates.schedules import Constant

NUM_EXAMPLES, NUM_STEPS = 24, 3
AVX2 = {"cpu_instructions": frozenset({"avx2"}), "threads_per_tower": 1}
OPTIONS = StepOptions(schedule=Constant(0.01), batch_stats="synced")


def convolutional():
    def build():
        images = layers.Input((8, 8, 32))
        maps = layers.Conv2D(64, 3, padding="same", use_bias=False, name="first")(images)
        maps = layers.Activation("relu", name="relu")(layers.BatchNormalization(name="norm")(maps))
        branches = [
            layers.Conv2D(64, 3, padding="same", activation=name, name=name)(maps) for name in ("gelu", "silu")
        ]
        means = layers.GlobalAveragePooling2D()(layers.Add()(branches))
        return keras.Model(images, layers.Dense(NUM_CLASSES, name="logits")(means))

    draw = np.random.default_rng(0)
    features = draw.normal(size=(NUM_EXAMPLES, 8, 8, 32)).astype(np.float32)
    return TinyTask(build=build, examples=Batch(features, draw.integers(0, NUM_CLASSES, NUM_EXAMPLES)))


def towers(devices, **options):
    return lambda task: towers_strategy(task, devices, dataclasses.replace(OPTIONS, **options))


def stages():
    devices = dataclasses.replace(cpus_in_groups("stage:2"), **AVX2)
    options = dataclasses.replace(OPTIONS, batch_stats="average")
    return lambda task: pipeline_strategy(task, devices, options, pipeline=PipelineOptions(microbatches=1))


def slices(grid, **options):
    devices = dataclasses.replace(cpus_in_groups(grid), **AVX2)
    return lambda task: slices_strategy(task, devices, dataclasses.replace(OPTIONS, **options))


MODES = {
    "one device": towers(cpus(1, **AVX2)),
    "two towers, recomputing": towers(cpus(2, **AVX2), recompute="full"),
    "zero 3": towers(cpus(2, zero=3, **AVX2)),
    "mirrored": lambda task: mirrored_strategy(task, cpus(2, **AVX2), OPTIONS),
    "slices, recomputing": slices("slice:2", recompute="full"),
    "stages": stages(),
    "branches": lambda task: branches_strategy(
        task, dataclasses.replace(cpus_in_groups("branch:2"), **AVX2), OPTIONS
    ),
}


@pytest.fixture(scope="module")
def expected():
    """The parameters that TensorFlow's own kernels give on one device."""
    strategy = towers(cpus(1), tuned_for_cpu=False, fused_batch_norm=False)(convolutional())
    strategy.run_steps(NUM_STEPS)
    return parameters_of(strategy)


@pytest.mark.full
@pytest.mark.skipif(not runs_onednn(), reason="the kernels are chosen where oneDNN runs")
@pytest.mark.parametrize("name", MODES)
def test_mode_equals_tensorflow_s_kernels_on_one_device(name, expected):
    strategy = MODES[name](convolutional())
    strategy.run_steps(NUM_STEPS)
    assert_close(parameters_of(strategy), expected, 1e-4)
