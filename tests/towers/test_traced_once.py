"""Graphs that are optimized once: the same numbers, types of results and side effects, and fewer nodes to copy."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.tiers import first_quick
from tests.towers.tiny_tasks import stacked
from towers import traced_once
from towers.hardware.cpu_instructions import AVX512, ONEDNN_LIMIT, cpu_instructions
from towers.hardware.cpu_kernels import runs_onednn
from towers.layers.kernels import LayerKernels
from towers.precision import layer_precision
from towers.task import Batch, WeightedLoss
from towers.tower import TowerFunction
from towers.traced_once import TracedOnce, optimized_if_needed

LENGTH, WIDTH = 7, 4
CPU = "/device:CPU:0"


def convolutions():
    return [
        layers.Reshape((LENGTH, 1, 1)),
        layers.Conv2D(3, (2, 1)),
        # On some CPUs the optimizer would join them, and fail because three is no multiple of four.
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Flatten(),
    ]


MODELS = {
    "convolutions": (convolutions, "float32"),
    "recurrent": (lambda: [layers.Embedding(9, WIDTH), layers.LSTM(5)], "int32"),
    "loop": (lambda: [layers.Embedding(9, WIDTH), layers.GRU(5, reset_after=False, activation="relu")], "int32"),
    "dropout": (lambda: [layers.Dropout(0.5), layers.Dense(8), layers.GaussianNoise(1.0)], "float32"),
}


class LengthTask:
    """The part of a `towers.task.Task` that a tower uses; the loss is the sum of squares of the outputs."""

    def loss(self, outputs, batch):
        return WeightedLoss(tf.reduce_sum(tf.square(outputs)), tf.cast(tf.shape(batch.labels)[0], tf.float32))

    def metrics(self, outputs, batch):
        return {}


def arguments_of(model, kind, count):
    draw = np.random.default_rng(count)
    features = draw.integers(0, 9, (count, LENGTH)) if kind == "int32" else draw.normal(size=(count, LENGTH))
    batch = Batch(tf.constant(features, kind), tf.zeros([count], tf.int32))
    variables = TowerFunction(LengthTask(), model).variables
    values = [[tf.constant(v.numpy()) for v in kept] for kept in (variables.parameters, variables.state)]
    return *values, batch, tf.constant([3, 5]), tf.constant(2.0)


@pytest.mark.parametrize("name", first_quick(MODELS, 2))
def test_a_tower_gives_the_same_numbers(name, monkeypatch):
    build, kind = MODELS[name]
    model = keras.Sequential([layers.Input((LENGTH,), dtype=kind), *build()])
    tower = TowerFunction(LengthTask(), model)
    with monkeypatch.context() as patch:
        patch.setattr(traced_once, "_must_optimize", lambda concrete: False)
        plain = TowerFunction(LengthTask(), model)
        plain(*arguments_of(model, kind, 2))
    for count in (2, 5):
        given = arguments_of(model, kind, count)
        found, expected = tower(*given), plain(*given)
        tf.nest.assert_same_structure(found, expected, expand_composites=True)
        tf.nest.map_structure(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6),
            found,
            expected,
            expand_composites=True,
        )


def test_the_optimized_graph_is_smaller():
    def wasteful(batch):
        ones = tf.ones([4, 4])
        return tf.reduce_sum(tf.matmul(ones, ones)) + tf.reduce_sum(batch.features) + tf.reduce_sum(batch.features)

    spec = Batch(tf.TensorSpec([None, 3]), tf.TensorSpec([None]))
    concrete = tf.function(wasteful, autograph=False).get_concrete_function(spec)
    assert len(traced_once.flat_graph(concrete).graph_def.node) < len(concrete.graph.as_graph_def().node)
    assert optimized_if_needed(concrete)(Batch(tf.ones([2, 3]), tf.ones([2]))).numpy() == 64 + 12


@pytest.mark.skipif(
    AVX512 not in cpu_instructions(os.environ.get(ONEDNN_LIMIT, "")) or not runs_onednn(),
    reason="only oneDNN with AVX-512 joins bfloat16 operations",
)
@pytest.mark.parametrize(
    "device, use_bias, is_joined", [("", False, True), ("", True, True), (CPU, False, True), (CPU, True, False)]
)
def test_which_batch_norms_are_joined_with_their_relu(monkeypatch, device, use_bias, is_joined):
    """Joined they are twice as fast. A convolution on a named device would be joined with its bias, and fail."""
    monkeypatch.setattr(traced_once, "_must_optimize", lambda concrete: True)
    kernels = LayerKernels(exact_bias_gradients=True)
    with layer_precision("bfloat16"):
        convolution = layers.Conv2D(4, 3, use_bias=use_bias)
        model = stacked((6, 6, 4), convolution, layers.BatchNormalization(), layers.ReLU())

    def outputs(images):
        with tf.device(device), kernels.in_place(model):
            return model(images, training=True)

    concrete = tf.function(outputs, autograph=False).get_concrete_function(tf.TensorSpec([None, 6, 6, 4]))
    types = [node.op for node in traced_once.flat_graph(concrete).graph_def.node]
    assert ("_FusedBatchNormEx" in types) == is_joined
    assert optimized_if_needed(concrete)(tf.ones([2, 6, 6, 4])).dtype == tf.bfloat16


def test_a_side_effect_without_consumers_still_happens():
    def checked(batch):
        tf.debugging.assert_less(batch.features, 5.0)
        return tf.reduce_sum(batch.features)

    traced = TracedOnce(checked)
    assert traced(Batch(tf.constant([1.0, 2.0]), tf.zeros([2]))).numpy() == 3
    with pytest.raises(tf.errors.InvalidArgumentError):
        traced(Batch(tf.constant([1.0, 7.0, 2.0]), tf.zeros([3])))


def test_a_captured_lookup_table_works():
    words = layers.StringLookup(vocabulary=["a", "b"])
    traced = TracedOnce(lambda batch: words(batch.features))
    np.testing.assert_array_equal(traced(Batch(tf.constant(["b", "a", "?"]), tf.zeros([3]))), [2, 1, 0])


def test_a_captured_tensor_works():
    kept = tf.constant([2.0, 3.0])
    traced = TracedOnce(lambda batch: batch.features * kept)
    np.testing.assert_array_equal(traced(Batch(tf.ones([4, 2]), tf.zeros([4]))), [[2.0, 3.0]] * 4)


def test_identity_nodes_at_the_end_are_removed():
    """Except those that are kept by name, that other nodes use, or that forward an argument."""

    @tf.function(autograph=False)
    def function(x):
        product = x * 2.0
        used = tf.identity(product, name="used")
        return tf.identity(product, name="at_the_end"), tf.identity(x, name="argument"), used + 1.0

    concrete = function.get_concrete_function(tf.TensorSpec([2], tf.float32))
    graph_def = concrete.graph.as_graph_def()
    names = [tensor.name for tensor in concrete.outputs]
    found = traced_once._bypass_identities(graph_def, names, kept=[names[2].split(":")[0]])
    left = {node.name for node in graph_def.node}
    assert found[0] == "mul:0" and found[2] == "add:0"
    assert {"used", "mul", "add"} <= left and "at_the_end" not in left and names[2].split(":")[0] in left
    given = tf.constant([1.0, 3.0])
    for ours, theirs in zip(optimized_if_needed(concrete)(given), concrete(given), strict=True):
        np.testing.assert_array_equal(ours, theirs)
