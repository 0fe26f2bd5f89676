"""Compiled ReLUs: TensorFlow's numbers, with and without sums as their inputs; which layers get them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.tiers import first_quick
from tests.towers.layers.kernel_modes import updates_by_tensorflow, updates_in
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.tiny_tasks import assert_close, stacked
from towers.layers import compiled_relu
from towers.layers.compiled_relu import relus_to_compile
from towers.layers.kernels import LayerKernels
from towers.tracing.flat_graph import flat_graph

SHAPE = (3, 100)
KERNELS = LayerKernels(compiled_relu=True)
ADDITIONS = ("AddV2", "AddN")


@pytest.fixture(autouse=True)
def also_for_few_elements(monkeypatch):
    """Compiles layers of few elements too, because the tests' arrays are small."""
    monkeypatch.setattr(compiled_relu, "FEWEST_ELEMENTS", 12)


def alone(x):
    return layers.ReLU()(x)


def of_a_sum(x):
    return layers.ReLU()(layers.Add()([x, 0.5 * x]))


def of_a_sum_of_odd_length(x):
    return of_a_sum(layers.Lambda(lambda x: x[..., 1:])(x))


def used_twice(x):
    found = layers.Activation("relu")(x)
    return 2 * found - ops.square(found)


def of_a_sum_used_twice(x):
    """The ReLU is used twice, and its sum by another operation too."""
    total = layers.Add()([x, -0.5 * x])
    found = layers.Activation("relu")(total)
    return found * total - ops.square(found)


def squared_sum(x):
    return ops.square(of_a_sum(x))


def of_a_sum_with_one_example(x):
    """The second addend is one example, but both have an unknown number of examples in the graph."""
    return layers.ReLU()(layers.Lambda(lambda x: 2 * x + x[:1])(x))


def behind_a_batch_norm(x):
    return layers.ReLU()(layers.BatchNormalization()(x))


def used_thrice(x):
    found = layers.ReLU()(x)
    return layers.Add()([2 * found, ops.square(found), -found])


def built(network, policy="mixed_bfloat16") -> keras.Model:
    keras.config.set_dtype_policy(policy)
    try:
        inputs = keras.Input(SHAPE)
        return keras.Model(inputs, network(inputs))
    finally:
        keras.config.set_dtype_policy("float32")


def traced(model, kernels):
    """Outputs, and the gradients of inputs for upstream gradients that differ."""

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, *SHAPE])])
    def step(inputs):
        with tf.GradientTape() as tape, kernels.in_place(model):
            tape.watch(inputs)
            outputs = model(inputs, training=True)
        upstream = tf.cast(2.0 + tf.sin(inputs[..., : outputs.shape[-1]]), outputs.dtype)
        return outputs, tape.gradient(outputs, inputs, upstream)

    return step


def types_in(model) -> list[str]:
    """Types of the operations of both passes, without the float32 additions at the passes' ends."""
    graph = flat_graph(traced(model, KERNELS).get_concrete_function()).without_dead_nodes().graph_def
    wide = tf.float32.as_datatype_enum
    return [node.op for node in graph.node if not (node.op in ADDITIONS and node.attr["T"].type == wide)]


def numbers() -> tf.Tensor:
    """Numbers of both signs, zeros and infinities of both signs among them."""
    drawn = np.random.default_rng(0).normal(size=(4, *SHAPE))
    drawn[0, 0, :4] = 0.0, -0.0, np.inf, -np.inf
    return tf.constant(drawn, tf.float32)


NETWORKS = [
    of_a_sum_of_odd_length,
    alone,
    of_a_sum,
    of_a_sum_with_one_example,
    used_twice,
    behind_a_batch_norm,
]


@pytest.mark.parametrize(
    "network, policy",
    [
        *((network, "mixed_bfloat16") for network in NETWORKS),
        *first_quick((network, "mixed_float16") for network in NETWORKS),
    ],
)
def test_as_tensorflow(network, policy):
    """The same bits: a sum is rounded once by both, and a ReLU rounds nothing."""
    model, inputs = built(network, policy), numbers()[1:]
    found, expected = (traced(model, kernels)(inputs) for kernels in (KERNELS, LayerKernels()))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(tf.cast(ours, tf.float32), tf.cast(theirs, tf.float32))


@pytest.mark.parametrize("network", [used_thrice, of_a_sum_used_twice])
def test_sums_in_another_order(network):
    """Sums of three gradients: each addition rounds by 2^-8 of numbers up to 10."""
    model, inputs = built(network), numbers()[1:]
    found, expected = (traced(model, kernels)(inputs) for kernels in (KERNELS, LayerKernels()))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(tf.cast(ours, tf.float32), tf.cast(theirs, tf.float32), atol=0.08)


@pytest.mark.parametrize(
    "network, policy",
    first_quick(
        [
            *[(of_a_sum, "mixed_bfloat16"), (alone, "mixed_float16")],
            *[(alone, "mixed_bfloat16"), (of_a_sum, "mixed_float16")],
        ],
        2,
    ),
)
def test_infinities_and_nan_stay(network, policy):
    model = built(network, policy)
    outputs, _ = traced(model, KERNELS)(numbers())
    assert np.array_equal(outputs[0, 0, :4], [0.0, 0.0, np.inf, 0.0])
    for nan in (np.nan, -np.nan):
        outputs, _ = traced(model, KERNELS)(tf.fill([1, *SHAPE], nan))
        assert np.isnan(tf.cast(outputs, tf.float32)).all()


@pytest.mark.parametrize("network", [used_twice, squared_sum])
def test_gradients_of_gradients_are_tensorflows(network):
    model, inputs = built(network), numbers()[1:]

    def slope(kernels):
        with tf.GradientTape() as outer:
            outer.watch(inputs)
            with tf.GradientTape() as inner, kernels.in_place(model):
                inner.watch(inputs)
                outputs = model(inputs, training=True)
            found = inner.gradient(outputs, inputs)
        return outer.gradient(found, inputs)

    found, expected = (tf.function(slope, autograph=False)(kernels) for kernels in (KERNELS, LayerKernels()))
    assert np.any(expected)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("network, adds", [(of_a_sum, 0), (used_twice, 0), (of_a_sum_used_twice, 3)])
def test_sums_are_part_of_the_loop(network, adds):
    """One loop forward and one backward; a sum is computed by itself only if something else needs it."""
    types = types_in(built(network))
    assert types.count("PartitionedCall") == 2 and not any("Relu" in kind for kind in types)
    assert sum(kind in ADDITIONS for kind in types) == adds


def test_behind_a_batch_norm_the_outputs_are_tensorflows():
    """TensorFlow's graph optimizer joins a ReLU with its batch norm."""
    types = types_in(built(behind_a_batch_norm))
    assert types.count("Relu") == types.count("PartitionedCall") == 1 and "ReluGrad" not in types


@pytest.mark.parametrize(
    "layer, is_compiled",
    [
        (layers.ReLU(dtype="mixed_bfloat16"), True),
        (layers.Activation("relu", dtype="mixed_float16"), True),
        (layers.Conv2D(3, 1, activation="relu", dtype="mixed_bfloat16"), True),
        (layers.ReLU(dtype="float32"), False),
        (layers.ReLU(6.0, dtype="mixed_bfloat16"), False),
        (layers.ReLU(negative_slope=0.1, dtype="mixed_bfloat16"), False),
        (layers.Activation("relu6", dtype="mixed_bfloat16"), False),
        (layers.Conv2D(2, 1, activation="relu", dtype="mixed_bfloat16"), False),
    ],
    ids=["ReLU", "activation", "of a layer", "float32", "bounded", "leaky", "another", "few elements"],
)
def test_which_layers(layer, is_compiled):
    model = stacked((2, 2, 3), layer)
    assert len(relus_to_compile(model)) == is_compiled
    line = "1 ReLU layer compiled for the CPU (tuned_for_cpu=False disables this)"
    assert KERNELS.notices(model) == [line] * is_compiled


def test_layers_can_be_described_meanwhile():
    """This happens where operations are timed to balance the stages of a pipeline."""
    model = stacked((2, 2, 3), layers.Conv2D(3, 1, activation="relu", dtype="mixed_bfloat16"))
    with KERNELS.in_place(model):
        assert "_activation" in str(model.layers[-1].get_config()["activation"])


class Bounded(layers.Dense):
    """A Keras layer that passes its activation an option."""

    def call(self, inputs, training=None):
        return self.activation(inputs @ self.kernel, max_value=0.5)


def test_options_of_an_activation_stay():
    model = built(Bounded(100, "relu", dtype="mixed_bfloat16"))
    found, expected = (traced(model, kernels)(numbers()[1:]) for kernels in (KERNELS, LayerKernels()))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(tf.cast(ours, tf.float32), tf.cast(theirs, tf.float32))


def test_varying_lengths_keep_kerass():
    assert not relus_to_compile(stacked((None, 8), layers.ReLU(dtype="mixed_bfloat16")))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["recomputation", "zero=3", "split backward passes", "branches"])
def test_a_run_has_the_same_numbers(mode):
    """The updates of 5 steps with the loops are those of float32 without them, up to bfloat16's rounding.

    `test_products.py` tests that the other modes replace kernels.
    """

    def run(strategy):
        assert any("1 ReLU layer compiled" in line for line in strategy.notices)
        with recorded_graphs() as graphs:
            strategy.run_steps(5)
        assert not any("Relu" in node.op for node in graphs.nodes)

    found = updates_in(mode, ["avx2", "avx512f"], run, channels=8, precision="bfloat16")
    assert_close(found, updates_by_tensorflow(8, 5), 4e-2)
