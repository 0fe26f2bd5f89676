"""Graphs that are traced and optimized once: the same numbers, types of results, side effects, captured values."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.tiers import first_quick
from towers.task import Batch, WeightedLoss
from towers.tower import TowerFunction
from towers.tracing import graph_optimizer
from towers.tracing.traced_once import TracedOnce

LENGTH, WIDTH = 7, 4


def convolutions():
    return [
        layers.Reshape((LENGTH, 1, 1)),
        layers.Conv2D(3, (2, 1)),
        # On some CPUs the optimizer would join norm and ReLU, and fail: three channels are no multiple of four.
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
        patch.setattr(graph_optimizer, "must_optimize", lambda concrete: False)
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
