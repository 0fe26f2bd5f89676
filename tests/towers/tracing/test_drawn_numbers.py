"""A graph that XLA compiles draws TensorFlow's random numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from models.own_task import OwnTask
from strategies.towers import towers_strategy
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import assert_close, parameters_of
from towers.options import StepOptions
from towers.tracing.drawn_numbers import drawn_by_tensorflow, drawn_otherwise

# Negative seeds too: XLA alone would extend them differently.
SEEDS = [[3, 5], [-1045986709, 0], [2**31 - 1, -(2**31)]]
EXACT = {
    "uniform float64": lambda seed: tf.random.stateless_uniform([5, 3], seed, dtype=tf.float64),
    "uniform float32": lambda seed: tf.random.stateless_uniform([5, 3], seed),
    "uniform bfloat16": lambda seed: tf.random.stateless_uniform([5, 3], seed, dtype=tf.bfloat16),
    "uniform float16": lambda seed: tf.random.stateless_uniform([5, 3], seed, dtype=tf.float16),
    "scalar": lambda seed: tf.random.stateless_uniform([], seed),
    "whole": lambda seed: tf.random.stateless_uniform([5, 3], seed, minval=2, maxval=1000, dtype=tf.int64),
    "all bits": lambda seed: tf.random.stateless_uniform([5, 3], seed, minval=None, maxval=None, dtype=tf.int32),
    "dropout": lambda seed: tf.nn.experimental.stateless_dropout(tf.ones([7, 3]), 0.4, seed),
    "another seed": lambda seed: tf.random.experimental.stateless_fold_in(seed, 7),
    "in a loop": lambda seed: tf.while_loop(
        lambda index, _: index < 3,
        lambda index, total: (index + 1, total + tf.random.stateless_uniform([4], seed + index)),
        (0, tf.zeros([4])),
    )[1],
}
NORMAL = {"float32": 4e-6, "bfloat16": 2e-2, "float64": 1e-15, "float16": 2e-3}


def compiled(draw):
    return tf.function(drawn_by_tensorflow()(draw), jit_compile=True, autograph=False)


# Converted from the same bits as the others.
ALIKE = {"uniform float64", "uniform float16", "all bits"}


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(draw, id=name, marks=[pytest.mark.full] if name in ALIKE else [])
        for name, draw in EXACT.items()
    ],
)
def test_exact(draw):
    as_graph, by_xla = tf.function(draw, autograph=False), compiled(draw)
    for seed in SEEDS:
        np.testing.assert_array_equal(by_xla(tf.constant(seed)), as_graph(tf.constant(seed)))


@pytest.mark.parametrize("dtype, tolerance", first_quick(NORMAL.items()))
def test_normal(dtype, tolerance):
    """401 numbers are drawn in pairs, so the last one is alone."""
    by_xla = compiled(lambda seed: tf.random.stateless_normal([401], seed, dtype=dtype))
    for seed in SEEDS:
        expected = tf.random.stateless_normal([401], seed, dtype=dtype)
        found, expected = (tf.cast(numbers, tf.float64) for numbers in (by_xla(tf.constant(seed)), expected))
        np.testing.assert_allclose(found, expected, atol=tolerance)


def test_what_is_traced_later_is_not_changed():
    compiled(lambda seed: tf.random.stateless_uniform([2], seed))(tf.constant([1, 2]))
    graph = tf.function(lambda: tf.random.stateless_uniform([2], [1, 2])).get_concrete_function().graph
    assert "StatelessRandomUniformFullIntV2" not in {node.op for node in graph.as_graph_def().node}


def test_numbers_that_xla_draws_otherwise():
    kinds = {"MatMul", "RandomUniform", "StatelessTruncatedNormalV2", "StatelessMultinomial"}
    assert drawn_otherwise(kinds | {"StatelessRandomUniformIntV2"}) == kinds - {"MatMul"}


def dropping_task() -> OwnTask:
    def model():
        return keras.Sequential(
            [
                layers.Input((4, 3)),
                layers.Dense(8, "relu", name="hidden"),
                layers.SpatialDropout1D(0.3),
                layers.GaussianNoise(0.2),
                layers.SimpleRNN(8, dropout=0.2, recurrent_dropout=0.3, name="recurrent"),
                layers.Dropout(0.4),
                layers.Dense(2, name="logits"),
            ]
        )

    draw = np.random.default_rng(1)
    data = (draw.normal(size=(24, 4, 3)).astype(np.float32), draw.integers(0, 2, 24))
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return OwnTask(model=model, train_data=data, losses=losses, batch_size=8, seed=2)


@pytest.mark.full
def test_dropout_and_noise_train_alike():
    found = []
    for xla in (False, True):
        strategy = towers_strategy(dropping_task(), cpus(1), StepOptions(xla=xla, seed=4))
        strategy.run_steps(6)
        found.append(parameters_of(strategy))
    assert_close(found[1], found[0])
