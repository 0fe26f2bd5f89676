"""Runs of a network with two branches in the modes that replace its layers' kernels in different places."""

import dataclasses
import functools

import keras
from keras import layers

from strategies.registry import build_strategy
from strategies.slices import SliceOptions
from tests.towers.logical_cpus import cpus
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, images, parameters_of
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.updates.schedules import Constant

# By mode: (strategy, devices, options of the step, options of the mode)
MODES = {
    "two towers": ("towers", cpus(2), {}, {}),
    "recomputation": ("towers", cpus(2), {"recompute": "full"}, {}),
    "zero=3": ("towers", cpus(2, zero=3), {}, {}),
    "split backward passes": (
        "pipeline",
        cpus(2),
        {},
        {"pipeline": PipelineOptions(schedule="zb_h1", microbatches=3)},
    ),
    "slices": ("slices", cpus(2), {}, {}),
    "branches": ("branches", cpus(2), {}, {}),
}


def network(channels: int) -> keras.Model:
    """Two branches with a convolution each, behind a convolution with fewer channels."""
    inputs = keras.Input((6, 6, 3))
    padded = layers.ZeroPadding2D(1)(inputs)
    stem = layers.Conv2D(channels, 3, padding="same", activation="relu", name="stem")(padded)
    branches = [layers.Conv2D(channels, 3, padding="same", name=name)(stem) for name in ("one", "two")]
    pooled = layers.GlobalAveragePooling2D()(layers.Concatenate()(branches))
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(pooled))


def updates_in(mode, instructions, run, *, channels: int, split_of_one: str = "whole", **of_kernels) -> dict:
    """The change of each parameter in a run with parts and microbatches of different sizes.

    Args:
      mode: a key of MODES.
      instructions: instructions of the CPUs.
      run: function that trains with the given strategy.
      channels: channels of the network's convolutions.
      split_of_one: split of the layer "one", if the mode has slices.
      of_kernels: more options of the step.
    """
    name, devices, of_step, of_mode = MODES[mode]
    devices = dataclasses.replace(devices, threads_per_tower=1, cpu_instructions=frozenset(instructions))
    if name == "slices":
        of_mode = {"slices": SliceOptions(layout=(("one", split_of_one), ("two", "whole")))}
    step = StepOptions(schedule=Constant(0.05), **of_step, **of_kernels)
    task = TinyTask(build=lambda: network(channels), examples=images(21), batch_size=7)
    strategy = build_strategy(name, task, devices, step, **of_mode)
    before = parameters_of(strategy)
    run(strategy)
    return {name: value - before[name] for name, value in parameters_of(strategy).items()}


@functools.cache
def updates_by_tensorflow(channels: int, num_steps: int) -> dict:
    """The updates by TensorFlow's own kernels in float32. Without batch norm, every mode has these numbers."""

    def run(strategy):
        assert not any("tuned_for_cpu" in line for line in strategy.notices)
        with recorded_graphs() as graphs:
            strategy.run_steps(num_steps)
        assert any("Relu" in node.op for node in graphs.nodes)

    return updates_in("two towers", ["avx2", "avx512f"], run, channels=channels, tuned_for_cpu=False)
