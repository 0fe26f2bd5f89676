"""Winograd's convolutions: the numbers of direct ones, forward and backward; which layers get them; memory."""

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from strategies.registry import build_strategy
from strategies.slices import SliceOptions
from tests.tiers import first_quick
from tests.towers.layers.kernel_modes import network, updates_by_tensorflow, updates_in
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import TinyTask, assert_close, images, stacked
from towers import options
from towers.layers.convolutions import winograd
from towers.layers.convolutions.winograd import Gate
from towers.layers.convolutions.winograd_loops import Loops
from towers.layers.kernels import LayerKernels
from towers.memory.engine_memory import EngineMemory
from towers.memory.step_graph import StepGraph
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.tracing import graph_optimizer
from towers.tracing.flat_graph import flat_graph


class OtherEvaluationBatches(TinyTask):
    """Evaluates batches of 4 examples if it trains with 8, and of 8 if it trains with 4."""

    @property
    def eval_batch_size(self) -> int:
        return 12 - self.batch_size


def drawn(shape, seed) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def passes(convolution, *numbers: np.ndarray, dtype) -> list[np.ndarray]:
    """Outputs, and the gradients of inputs and kernel; `numbers` are inputs, kernel and upstream gradient."""

    @tf.function(autograph=False)
    def both(inputs, kernel, upstream):
        with tf.GradientTape() as tape:
            tape.watch([inputs, kernel])
            outputs = convolution(inputs, kernel)
        return [outputs, *tape.gradient(outputs, [inputs, kernel], upstream)]

    return [found.numpy() for found in both(*(tf.constant(value, dtype) for value in numbers))]


def direct(inputs, kernel):
    return tf.nn.conv2d(inputs, kernel, strides=1, padding="SAME")


@pytest.mark.parametrize(
    "height, width, count, usual",
    first_quick(
        [
            *((15, 7, *counts) for counts in [(37, None), (20, 37), (1, 37), (37, 37), (0, None), (0, 37)]),
            *((*size, 37, None) for size in [(4, 4), (8, 12)]),
        ],
        2,
    ),
)
def test_as_a_direct_convolution(monkeypatch, height, width, count, usual):
    """Errors are relative to the norm of all numbers; those of a direct convolution in float32 are 3e-7.

    Loops compute at most 64 tiles at a time, of nearly equal numbers of images: five times 8 for 37 images of 8
    tiles, four times 10 for 37 images of 6 tiles. A batch of fewer images than usual is padded with zeros.
    """
    monkeypatch.setattr(winograd, "_FEWEST_PIXELS", 1)
    numbers = drawn((count, height, width, 6), 0), drawn((3, 3, 6, 5), 1), drawn((count, height, width, 5), 2)
    found = passes(Gate(1, usual).convolve, *numbers, dtype=tf.float32)
    for ours, exact in zip(found, passes(direct, *numbers, dtype=tf.float64), strict=True):
        assert np.linalg.norm(ours - exact) <= 5e-6 * np.linalg.norm(exact)


@pytest.mark.full
def test_in_a_condition(monkeypatch):
    monkeypatch.setattr(winograd, "_FEWEST_PIXELS", 1)

    def in_a_condition(inputs, kernel):
        gate = Gate(1, 4)
        return tf.cond(tf.reduce_sum(inputs) < 1e9, lambda: gate.convolve(inputs, kernel), lambda: inputs[..., :5])

    numbers = drawn((3, 8, 8, 6), 0), drawn((3, 3, 6, 5), 1), drawn((3, 8, 8, 5), 2)
    found, exact = passes(in_a_condition, *numbers, dtype=tf.float32), passes(direct, *numbers, dtype=tf.float64)
    for ours, theirs in zip(found, exact, strict=True):
        assert np.linalg.norm(ours - theirs) <= 5e-6 * np.linalg.norm(theirs)


def penalty_gradients(convolution, *numbers: np.ndarray, dtype) -> list[np.ndarray]:
    """Gradients of a sum of squared gradients by inputs and kernel; the upstream gradient depends on both too."""

    @tf.function(autograph=False)
    def of_penalty(inputs, kernel):
        with tf.GradientTape() as outer:
            outer.watch([inputs, kernel])
            with tf.GradientTape() as inner:
                inner.watch([inputs, kernel])
                total = tf.reduce_sum(convolution(inputs, kernel) ** 2)
            penalty = tf.add_n([tf.reduce_sum(one**2) for one in inner.gradient(total, [inputs, kernel])])
        return outer.gradient(penalty, [inputs, kernel])

    return [found.numpy() for found in of_penalty(*(tf.constant(value, dtype) for value in numbers))]


@pytest.mark.full
def test_gradients_of_gradients(monkeypatch):
    """A layer whose call computes a gradient needs them."""
    monkeypatch.setattr(winograd, "_FEWEST_PIXELS", 1)
    numbers = drawn((3, 8, 8, 6), 0), drawn((3, 3, 6, 5), 1)
    found = penalty_gradients(Gate(1, 4).convolve, *numbers, dtype=tf.float32)
    for one, exact in zip(found, penalty_gradients(direct, *numbers, dtype=tf.float64), strict=True):
        assert np.linalg.norm(one - exact) <= 1e-5 * np.linalg.norm(exact)


def test_jacobians(monkeypatch):
    """TensorFlow vectorizes the backward passes of a Jacobian."""
    monkeypatch.setattr(winograd, "_FEWEST_PIXELS", 1)
    images, kernel = (tf.constant(drawn(shape, 0), tf.float32) for shape in ((3, 8, 8, 6), (3, 3, 6, 5)))

    @tf.function(autograph=False)
    def jacobians(convolution):
        with tf.GradientTape() as tape:
            tape.watch([images, kernel])
            means = tf.reduce_mean(convolution(images, kernel) ** 2, [0, 1, 2])
        return tape.jacobian(means, [images, kernel])

    for ours, theirs in zip(jacobians(Gate(1, 4).convolve), jacobians(direct), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_where_tensorflow_vectorizes_it_leaves_convolutions_alone(monkeypatch):
    monkeypatch.setattr(winograd, "_FEWEST_PIXELS", 1)
    images, kernel = tf.constant(drawn((3, 8, 8, 6), 0), tf.float32), tf.ones([3, 3, 6, 5])
    taken = []

    def of_one(image):
        taken.append(Gate(5).convolve(image[None], kernel))
        return direct(image[None], kernel)[0]

    tf.vectorized_map(of_one, images)
    assert taken == [None] * len(taken) and taken
    assert Gate(5).convolve(images, kernel) is not None


@pytest.mark.parametrize(
    "shape, kernel, dtype, is_taken",
    [
        ((8, 8, 32), (3, 3, 32, 32), "float32", True),
        pytest.param((15, 15, 64), (3, 3, 64, 256), "float32", True, marks=pytest.mark.full),
        ((8, 8, 31), (3, 3, 31, 32), "float32", False),
        ((8, 8, 32), (3, 3, 32, 31), "float32", False),
        ((8, 8, 32), (5, 5, 32, 32), "float32", False),
        ((8, 8, 32), (1, 3, 32, 32), "float32", False),
        ((8, 8, 32), (3, 3, 32, 32), "bfloat16", False),
        ((8, 8, 32), (3, 3, 32, 32), "float64", False),
        ((None, 8, 32), (3, 3, 32, 32), "float32", False),
        # Tiles that reach far over the edge save too few multiplications.
        ((3, 3, 32), (3, 3, 32, 32), "float32", False),
        ((5, 5, 32), (3, 3, 32, 32), "float32", False),
        ((7, 7, 32), (3, 3, 32, 32), "float32", False),
        ((7, 7, 64), (3, 3, 64, 64), "float32", True),
        ((13, 13, 64), (3, 3, 64, 64), "float32", False),
        pytest.param((13, 13, 128), (3, 3, 128, 128), "float32", True, marks=pytest.mark.full),
    ],
)
def test_what_it_takes(shape, kernel, dtype, is_taken):
    """Which layers are taken; the notice that a run prints counts the same ones."""
    *size, _, filters = kernel
    model = stacked(shape, layers.Conv2D(filters, size, padding="same", dtype=dtype))
    kernels = LayerKernels(winograd_channels=32)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, *shape], dtype)])
    def call(inputs):
        with kernels.in_place(model):
            return model(inputs)

    types = [operation.type for operation in call.get_concrete_function().graph.get_operations()]
    assert ("Conv2D" not in types) == is_taken
    line = "1 Conv2D layer by Winograd's method (tuned_for_cpu=False disables this)"
    assert kernels.notices(model) == ([line] if is_taken else [])


@pytest.mark.parametrize(
    "size, num_images, at_once, times",
    [
        *[(8, 128, 16, 8), (8, 100, 20, 5), (8, 5, 5, 1), (8, 34, 17, 2)],
        *[(12, 64, 8, 8), (12, 13, 7, 2), (28, 64, 1, 64)],
        (8, 37, 13, 3),  # 39 images: no divisor is near.
    ],
)
def test_an_iteration_divides_the_images_without_a_rest_where_it_can(size, num_images, at_once, times):
    found = Loops.of(size, size, 32, 32)._parts(num_images)
    assert tuple(map(int, found)) == (at_once, times)


@pytest.mark.parametrize("num_threads, channels, is_taken", [(1, 64, False), (2, 256, True), (1, 256, False)])
def test_two_threads_take_badly_filled_tiles_of_their_fewest_channels(num_threads, channels, is_taken):
    """Two threads need at least four times the channels of one thread; that many make up for such tiles."""
    model = stacked((7, 7, channels), layers.Conv2D(channels, 3, padding="same"))
    kernels = LayerKernels(winograd_channels=channels, num_threads=num_threads)
    assert bool(kernels.compiled_calls(model, 64)) is is_taken


@pytest.mark.parametrize(
    "num_examples, size, is_taken", [(8, 8, True), (7, 8, False), (32, 4, True), (8, 4, False), (None, 4, True)]
)
def test_few_examples_are_convolved_directly(num_examples, size, is_taken):
    """From 512 pixels in all examples, the kernel's transforms are a small part of the work."""
    shape = (None, size, size, 32)
    assert Gate(32, num_examples).takes(shape, "float32", (3, 3, 32, 32)) == is_taken


@pytest.mark.full
@pytest.mark.parametrize(
    "mode, of_mode, batch_size",
    [
        ("branches", {}, 8),
        ("towers", {}, 4),
        ("slices", {"slices": SliceOptions(layout=(("one", "whole"),))}, 8),
        ("pipeline", {"pipeline": PipelineOptions(microbatches=1)}, 4),
    ],
)
def test_evaluation_batches_choose_for_themselves(monkeypatch, mode, of_mode, batch_size):
    """With 8x8 pixels 8 examples are enough, 4 are not."""
    monkeypatch.setattr(options, "runs_onednn", lambda: True)
    devices = cpus(1 if mode == "towers" else 2)
    devices = dataclasses.replace(devices, threads_per_tower=1, cpu_instructions=frozenset(["avx2"]))
    task = OtherEvaluationBatches(build=lambda: network(32), examples=images(8), batch_size=batch_size)
    engine = build_strategy(mode, task, devices, StepOptions(), **of_mode).engine
    spec = task.dataset("eval", None).element_spec
    functions = engine.train_function.get_concrete_function(), engine.evaluator(spec)
    found = ["winograd" in str(function.graph.as_graph_def().library) for function in functions]
    assert found == [batch_size == 8, batch_size == 4]


@pytest.mark.parametrize("filters, num_loops", [(32, 2), (64, 3)])
def test_what_is_compiled_for_a_layer(filters, num_loops):
    """A short batch uses the loops of a whole one; both passes share a loop if their channels are equally many."""
    model = stacked((8, 8, 32), layers.Conv2D(filters, 3, padding="same"))
    kernels = LayerKernels(winograd_channels=32, num_examples=8)
    assert kernels.compiled_calls(model, 2) == kernels.compiled_calls(model, 8)
    calls = kernels.compiled_calls(model, 9)
    assert len(calls) == num_loops
    assert calls[0].shapes == ((9, 8, 8, 32), (36, 32, filters))
    assert ((9, 8, 8, filters), (36, filters, 32)) in [call.shapes for call in calls]


def test_batches_of_any_length_are_traced_once():
    spec = tf.TensorSpec([None, 8, 8, 4])

    @tf.function(autograph=False, input_signature=[spec])
    def traced(inputs):
        return Gate(fewest_channels=1).convolve(inputs, kernel)

    kernel = tf.constant(drawn((3, 3, 4, 4), 1), tf.float32)
    for count in (6, 1, 6):
        inputs = tf.constant(drawn((count, 8, 8, 4), count), tf.float32)
        np.testing.assert_allclose(traced(inputs), direct(inputs, kernel), atol=1e-4)
    assert traced.experimental_get_tracing_count() == 1


def test_the_backward_pass_transforms_again(monkeypatch):
    """A transformed kernel has four times as many numbers: each pass makes its own, once it is needed.

    TensorFlow's graph optimizer joins operations with the same inputs.
    """
    monkeypatch.setattr(graph_optimizer, "must_optimize", lambda concrete: True)

    def gradients(inputs, kernel, upstream):
        with tf.GradientTape() as tape:
            tape.watch([inputs, kernel])
            outputs = Gate(fewest_channels=1).convolve(inputs, kernel)
        return [outputs, *tape.gradient(outputs, [inputs, kernel], upstream)]

    spec = tf.TensorSpec([None, 8, 8, 4])
    traced = tf.function(gradients, autograph=False).get_concrete_function(spec, tf.TensorSpec([3, 3, 4, 4]), spec)
    nodes = flat_graph(traced).graph_def.node
    calls = [node for node in nodes if node.op.endswith("PartitionedCall")]
    waiting = [name for node in nodes for name in node.input if name.startswith("^")]
    assert len(calls) == 3
    # The images and their number, the upstream gradients, and two kernels.
    assert len({name for node in calls for name in node.input}) == 5
    assert waiting == ["^inputs", "^upstream"]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["slices", "split backward passes"])
def test_a_run_has_the_same_numbers(monkeypatch, mode):
    """The updates of 10 steps are equal, and memory predictions can read these graphs.

    `tests/conformance/test_compiled_kernels.py` tests the other modes with these loops.
    """
    monkeypatch.setattr(options, "runs_onednn", lambda: True)
    monkeypatch.setattr(winograd, "_FEWEST_PIXELS", 1)

    def run(strategy):
        assert any("2 Conv2D layers by Winograd" in line for line in strategy.notices)
        strategy.run_steps(10)
        assert EngineMemory(strategy.engine).passing_bytes(7) > 0

    assert_close(updates_in(mode, ["avx2"], run, channels=32), updates_by_tensorflow(32, 10), 1e-4)


def test_gradients_are_named_after_their_layer():
    """Timelines tell the layers of a backward pass apart by these names."""
    model = stacked((8, 8, 32), layers.Conv2D(32, 3, padding="same", name="inner"))

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 8, 8, 32])])
    def step(inputs):
        with tf.GradientTape() as tape, LayerKernels(winograd_channels=32).in_place(model):
            outputs = model(inputs)
        return tape.gradient(outputs, model.trainable_variables)

    operations = step.get_concrete_function().graph.get_operations()
    loops = [operation.name for operation in operations if operation.type.endswith("PartitionedCall")]
    assert sorted(name.startswith("gradient_tape/") for name in loops) == [False, True, True]
    assert all("/inner" in name for name in loops)


@pytest.mark.parametrize(
    "usual, count, of_images, of_kernel",
    first_quick(
        [
            *[(10, 2, 46_080, 61_440), (None, 37, 109_824, 159_744)],
            *[(None, 10, 46_080, 61_440), (None, 32, 73_728, 98_304), (10, 10, 46_080, 61_440)],
        ],
        2,
    ),
)
def test_predictions_know_what_a_loop_allocates(monkeypatch, usual, count, of_images, of_kernel):
    """An image has 4 tiles of 36 x 4 numbers of 4 bytes, before the products and after them.

    Of 32 images 16 are computed at a time. Between a transform's two steps two thirds of the tiles' bytes are
    needed again. A short batch runs what XLA compiled for the usual batch; only then images are copied. 37 images
    and their outputs are padded to three times 13; until the outputs are cut, tiles use the memory of the 37.
    """
    monkeypatch.setattr(winograd, "_FEWEST_PIXELS", 1)

    @tf.function(autograph=False)
    def tower(inputs, kernel):
        with tf.GradientTape() as tape:
            tape.watch([inputs, kernel])
            outputs = Gate(1, usual).convolve(inputs, kernel)
        return tape.gradient(outputs, [inputs, kernel])

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 8, 8, 4])])
    def traced(inputs):
        return tower(inputs, tf.zeros([3, 3, 4, 4]))

    operations = StepGraph(traced.get_concrete_function()).operations(count)
    found = sorted(one.workspace_bytes for one in operations if one.workspace_bytes)
    assert found == [of_images, of_images, of_kernel]
    pads = [one.outputs[0] for one in operations if re.search(r"Pad(_\d+)?$", one.name)]
    assert [pad.shares for pad in pads] == [None if count < usual else 0 for _ in pads]
    assert bool(pads) == (usual is not None)
