"""Compiled batch norms joined with the ReLUs behind them: Keras's numbers, and which loops run."""

import collections
import functools
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.tiers import first_quick
from towers.exchange import TowerExchange
from towers.layers import compiled_relu
from towers.layers.batch_norm import compiled
from towers.layers.kernels import LayerKernels
from towers.tracing.flat_graph import flat_graph

SHAPE = (4, 5, 6)
KERAS = LayerKernels(fused_batch_norm=False)
AVERAGED = LayerKernels(fused_batch_norm=False, compiled_batch_norm=True)
EXCHANGED = LayerKernels(compiled_batch_norm=True)
# Loops of a batch norm forward (sums, squares, outputs) and backward (sums, gradient).
FORWARD, BACKWARD = 3, 2


@pytest.fixture(autouse=True)
def also_for_few_elements(monkeypatch):
    """Compiles layers of few elements too, because the tests' arrays are small."""
    for module, name in (
        (compiled, "FEWEST_ELEMENTS"),
        (compiled, "FEWEST_BESIDE_FUSED"),
        (compiled_relu, "FEWEST_ELEMENTS"),
    ):
        monkeypatch.setattr(module, name, 1)


def norm(x):
    return layers.BatchNormalization()(x)


def relu_of_norm(x):
    return layers.ReLU()(norm(x))


def activation_of_norm(x):
    return layers.Activation("relu")(norm(x))


def residual(x):
    return layers.ReLU()(layers.Add()([norm(x), x]))


def residual_behind(x):
    """The batch norm is the second addend."""
    return layers.ReLU()(layers.Add()([x, norm(x)]))


def two_norms(x):
    return layers.ReLU()(layers.Add()([norm(x), norm(0.5 * x)]))


def used_twice(x):
    """The ReLU's gradient is a sum."""
    found = relu_of_norm(x)
    return 2 * found - ops.square(found)


def norm_used_twice(x):
    """Something else needs the batch norm's outputs."""
    normal = norm(x)
    return layers.Add()([layers.ReLU()(normal), ops.sin(normal)])


def reshaped(x):
    """Not joined, because of the reshape."""
    return layers.ReLU()(layers.Reshape((20, 6))(norm(x)))


def of_one_example(x):
    """One example is added to all, by an addition with an unknown number of examples."""
    return layers.ReLU()(layers.Lambda(lambda x: x[0] + x[1][:1])([norm(x), x]))


def bounded(x):
    """Not joined, because of the ReLU's maximum."""
    return layers.ReLU(1.0)(norm(x))


@tf.custom_gradient
def with_doubled_gradient(x):
    return tf.identity(x), lambda upstream: 2 * upstream


def gradient_between(x):
    """With an operation that returns its inputs, but changes their gradient."""
    return layers.ReLU()(layers.Lambda(with_doubled_gradient)(norm(x)))


class SlopeAdded(layers.Layer):
    """max(0, x) plus the derivative of its square by x, as a penalty in a layer would compute it."""

    def __init__(self):
        super().__init__()
        self.relu = layers.ReLU()

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = self.relu(x)
            squares = found**2
        return found + tape.gradient(squares, x)


def slope_of_norm(x):
    """With a tape that watches the batch norm's outputs, not what they were computed from."""
    return SlopeAdded()(norm(x))


def slope_of_residual(x):
    return SlopeAdded()(layers.Add()([norm(x), x]))


def frozen(x):
    layer = layers.BatchNormalization()
    layer.trainable = False
    return layers.ReLU()(layer(x))


class Ops(NamedTuple):
    """Operations of a float32 step with exchanged statistics. One `ReluGrad` serves both addends of a sum."""

    loops: int
    relus: int
    relu_gradients: int


JOINED = Ops(FORWARD + BACKWARD, 0, 0)
WITH_GRADIENT = JOINED._replace(relu_gradients=1)
NETWORKS = {
    relu_of_norm: JOINED,
    activation_of_norm: JOINED,
    residual: WITH_GRADIENT,
    residual_behind: WITH_GRADIENT,
    two_norms: Ops(2 * FORWARD + 2 * BACKWARD, 0, 1),
    used_twice: WITH_GRADIENT,
    norm_used_twice: Ops(FORWARD + 1 + BACKWARD, 0, 1),
    reshaped: Ops(FORWARD + BACKWARD, 1, 1),
    of_one_example: WITH_GRADIENT,
    bounded: Ops(FORWARD + BACKWARD, 1, 1),
    gradient_between: Ops(FORWARD + BACKWARD, 1, 1),
    slope_of_norm: JOINED._replace(relu_gradients=2),
    slope_of_residual: JOINED._replace(relu_gradients=3),
    frozen: Ops(1, 0, 1),
}


def built(network, policy="float32") -> keras.Model:
    keras.config.set_dtype_policy(policy)
    try:
        inputs = keras.Input(SHAPE)
        model = keras.Model(inputs, network(inputs))
    finally:
        keras.config.set_dtype_policy("float32")
    draw = np.random.default_rng(3)
    for variable in model.variables:
        variable.assign(draw.uniform(0.5, 1.5, variable.shape))
    return model


def traced(model, kernels, *, training=True, count=None):
    """Outputs, and the gradients of inputs and parameters for upstream gradients that differ."""
    exchange = TowerExchange(1) if kernels is EXCHANGED else None

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([count, *SHAPE])])
    def step(inputs):
        sources = [inputs, *(variable.value for variable in model.trainable_variables)]
        with tf.GradientTape() as tape, kernels.in_place(model, exchange, tf.constant(1.0)):
            tape.watch(inputs)
            outputs = model(inputs, training=training)
        upstream = tf.cast(2.0 + tf.sin(tf.cast(outputs, tf.float32)), outputs.dtype)
        return outputs, *tape.gradient(outputs, sources, upstream)

    return step


@functools.cache
def with_exchange(network, training=True):
    """A model of this network, and its step with exchanged statistics; `traced` writes no variable."""
    model = built(network)
    return model, traced(model, EXCHANGED, training=training)


def operations(step) -> collections.Counter:
    graph = flat_graph(step.get_concrete_function()).without_dead_nodes().graph_def
    return collections.Counter(node.op for node in graph.node)


def drawn() -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).normal(0.3, 2.0, (7, *SHAPE)), tf.float32)


def assert_near(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = (tf.cast(one, tf.float64).numpy() for one in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


# Networks whose operations alone are compared in the quick tests: their gradients are those of the others.
ALIKE = {
    *(activation_of_norm, residual_behind, two_norms, used_twice),
    *(reshaped, bounded, gradient_between, slope_of_residual),
}


@pytest.mark.parametrize(
    "network",
    [pytest.param(one, marks=[pytest.mark.full] if one in ALIKE else []) for one in NETWORKS],
    ids=lambda network: network.__name__,
)
@pytest.mark.parametrize("training", first_quick([True, False]))
def test_as_keras(network, training):
    model, step = with_exchange(network, training)
    assert_near(step(drawn()), traced(model, KERAS, training=training)(drawn()), 5e-6)


@pytest.mark.parametrize("network", first_quick(NETWORKS), ids=lambda network: network.__name__)
@pytest.mark.parametrize("training", first_quick([True, False]))
def test_as_keras_without_an_exchange(network, training):
    model = built(network)
    found, expected = (traced(model, one, training=training)(drawn()) for one in (AVERAGED, KERAS))
    assert_near(found, expected, 5e-6)


@pytest.mark.parametrize("network", first_quick([residual, two_norms]))
def test_sums_of_a_known_number_of_examples(network):
    """No addend can then be broadcast."""
    found, expected = (traced(built(network), one, count=7)(drawn()) for one in (EXCHANGED, KERAS))
    assert_near(found, expected, 5e-6)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
def test_the_relu_is_part_of_the_loops(network):
    """The batch norm's outputs are computed separately only where something else needs them."""
    found = operations(with_exchange(network)[1])
    assert Ops(found["PartitionedCall"], found["Relu"], found["ReluGrad"]) == NETWORKS[network]


@pytest.mark.parametrize("network", first_quick([residual, norm_used_twice, relu_of_norm, two_norms]))
@pytest.mark.parametrize("policy, tolerance", first_quick([("mixed_bfloat16", 2**-7), ("mixed_float16", 2**-10)]))
def test_short_numbers_are_near_those_of_float32(network, policy, tolerance):
    """Where a sum is near 0, rounding decides whether its gradient is 0, so norms are compared, not elements."""
    model, exact = built(network, policy), built(network)
    found, expected = traced(model, EXCHANGED)(drawn()), traced(exact, KERAS)(drawn())
    for ours, theirs in zip(found, expected, strict=True):
        error = tf.cast(ours, tf.float32) - tf.cast(theirs, tf.float32)
        assert tf.norm(error) < 4 * tolerance * tf.norm(tf.cast(theirs, tf.float32))


def test_gradients_of_gradients_are_kerass():
    model, inputs = built(relu_of_norm), drawn()

    def slope(kernels):
        with tf.GradientTape() as outer:
            outer.watch(inputs)
            with tf.GradientTape() as inner, kernels.in_place(model):
                inner.watch(inputs)
                # Keras's own arithmetic stops a gradient, so its moving statistics are compared.
                outputs = ops.square(model(inputs, training=False))
            found = inner.gradient(outputs, inputs)
        return outer.gradient(found, inputs)

    found, expected = (tf.function(slope, autograph=False)(kernels) for kernels in (AVERAGED, KERAS))
    assert np.any(expected)
    assert_near([found], [expected], 5e-6)
