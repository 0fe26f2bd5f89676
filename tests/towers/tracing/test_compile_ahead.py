"""Functions compiled in the background: for each tower's part, and never again by the step's graph."""

import dataclasses
import os
import subprocess
import sys

import pytest

from strategies.registry import build_strategy
from tests.towers.layers.kernel_modes import network
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import TinyTask, images
from towers import engine, options
from towers.layers.convolutions import winograd
from towers.options import StepOptions

# Prints a line between the compilation in the background and the step's calls.
PROGRAM = """
from towers import configure_devices

devices = configure_devices(num_towers=2)
import tensorflow as tf
from towers.tracing.compile_ahead import compile_ahead
from towers.layers.convolutions.winograd_loops import Loops

loops = Loops.of(8, 8, 3, 3)
calls = [loops.convolution_call(5), *loops.gradient_calls(5)]
compile_ahead({device: calls for device in devices.towers}).join()
print("the step begins", flush=True)


def tower(scale):
    images, kernel = tf.fill([5, 8, 8, 3], scale), tf.fill([36, 3, 3], scale)
    of_images, of_kernel = loops.convolution(images, kernel, 4), loops.kernel_gradient(images, images, 3)
    return [loops.convolution(images, kernel, 5), of_images, of_kernel]


@tf.function(autograph=False)
def step(scale):
    found = []
    for device in devices.towers:
        with tf.device(device):
            found += tower(scale)
    return found


print(len(step(tf.constant(1.0))), "results", flush=True)
strategy = tf.distribute.MirroredStrategy(devices.towers)
replicas = tf.function(lambda scale: strategy.run(tower, args=(scale,)), autograph=False)(tf.constant(1.0))
print(len(replicas), "results of each replica", flush=True)
"""


@pytest.mark.full
def test_a_graph_does_not_compile_again():
    """Two functions on each of two devices, called as towers do and as replicas of tf.distribute do."""
    logs = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_MAX_VLOG_LEVEL": "1"}
    logs["TF_CPP_VMODULE"] = "device_compilation_profiler=1"
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=200,
        env=os.environ | logs,
        check=True,
    )
    ahead, in_step = done.stdout.split("the step begins")
    assert "6 results" in in_step
    assert "3 results of each replica" in in_step
    assert ahead.count("Compiled __inference_winograd") == 4
    assert "Compiled __inference_winograd" not in in_step


@pytest.mark.full
@pytest.mark.parametrize(
    "mode, tuned, accumulation, expected",
    [
        ("towers", True, 1, [4, 3]),
        ("mirrored", True, 2, [2, 2]),
        ("towers", False, 1, None),
    ],
)
def test_the_first_step_starts_it_for_each_towers_part(monkeypatch, mode, tuned, accumulation, expected):
    """Once for two layers of the same shape, and in the first step only."""
    monkeypatch.setattr(options, "runs_onednn", lambda: True)
    monkeypatch.setattr(winograd, "_FEWEST_PIXELS", 1)
    started = []
    monkeypatch.setattr(engine, "compile_ahead", started.append)
    devices = dataclasses.replace(cpus(2), threads_per_tower=1, cpu_instructions=frozenset(["avx2"]))
    task = TinyTask(build=lambda: network(32), examples=images(21), batch_size=7)
    step = StepOptions(tuned_for_cpu=tuned, accumulation=accumulation)
    build_strategy(mode, task, devices, step).run_steps(2)
    if expected is None:
        assert not started
        return
    (calls,) = started
    shapes = [[call.shapes for call in of_device] for of_device in calls.values()]
    kernel = (36, 32, 32)
    assert list(calls) == list(devices.towers)
    for of_device, count in zip(shapes, expected, strict=True):
        part = (count, 8, 8, 32)
        assert of_device == [(part, kernel), (part, part)]
