"""Products of short numbers in float32, and exact sums: their numbers, their layers, how long tensors live."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.tiers import first_quick
from tests.towers.layers.kernel_modes import updates_by_tensorflow, updates_in
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.tiny_tasks import assert_close, stacked
from towers import options
from towers.devices import Devices
from towers.layers.kernels import LayerKernels
from towers.options import StepOptions
from towers.tracing import graph_optimizer
from towers.tracing.flat_graph import flat_graph

CPU = "/device:CPU:0"
KERNELS = LayerKernels(float32_products=True)


class OwnDense(layers.Dense):
    pass


def whole_numbers(shape, dtype=None) -> tf.Tensor:
    """-1, 0 and 1: bfloat16 rounds no sum over them as long as it is at most 256."""
    return tf.cast(np.random.default_rng(0).integers(-1, 2, shape), dtype or tf.float32)


def passes(model, inputs, upstream, kernels) -> list[tf.Tensor]:
    """Outputs, and the gradients of inputs and parameters."""
    with tf.GradientTape() as tape, kernels.in_place(model):
        tape.watch(inputs)
        outputs = model(inputs)
    return [outputs, *tape.gradient(outputs, [inputs, *model.trainable_variables], upstream)]


def traced_passes(model, kernels):
    """Outputs, and the gradients of inputs and parameters for upstream gradients of 1."""

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, *model.input_shape[1:]], tf.bfloat16)])
    def step(inputs):
        with tf.GradientTape() as tape, kernels.in_place(model):
            tape.watch(inputs)
            outputs = model(inputs)
        return [outputs, *tape.gradient(outputs, [inputs, *model.trainable_variables])]

    return step


def graph_of(model, kernels=KERNELS) -> tf.compat.v1.GraphDef:
    """The graph of both passes, as it is executed."""
    return flat_graph(traced_passes(model, kernels).get_concrete_function()).without_dead_nodes().graph_def


def depthwise(kernel_initializer, **given) -> layers.Layer:
    return layers.DepthwiseConv2D(3, depthwise_initializer=kernel_initializer, **given)


@pytest.mark.parametrize("policy", first_quick(["mixed_bfloat16", "mixed_float16"]))
@pytest.mark.parametrize(
    "shape, make",
    [
        ((6, 4), lambda **given: layers.Conv1D(3, 3, **given)),
        ((6, 5, 4), lambda **given: layers.Conv2D(3, 3, strides=2, activation="relu", **given)),
        ((6, 5, 4), lambda **given: layers.Conv2D(3, 1, use_bias=False, padding="same", **given)),
        ((4, 4, 4, 2), lambda **given: layers.Conv3D(3, 3, padding="same", **given)),
        ((6, 5, 4), lambda **given: layers.Conv2DTranspose(3, 3, strides=2, **given)),
        ((6, 5, 4), depthwise),
        ((4,), lambda **given: layers.Dense(3, activation="relu", **given)),
        ((2, 4), lambda **given: layers.Dense(3, use_bias=False, **given)),
        ((2, 4), lambda **given: layers.EinsumDense("abc,cd->abd", (None, 3), bias_axes="d", **given)),
    ],
    ids=["1d", "strides", "1x1", "3d", "transposed", "depthwise", "dense", "dense of rows", "einsum"],
)
def test_as_keras(shape, make, policy):
    initial = {"kernel_initializer": whole_numbers, "bias_initializer": whole_numbers}
    layer = make(dtype=policy, **initial)
    dtype = layer.compute_dtype
    model = stacked(shape, layer)
    inputs = whole_numbers((3, *shape), dtype)
    upstream = whole_numbers(model(inputs).shape, dtype)
    found, expected = (passes(model, inputs, upstream, one) for one in (KERNELS, LayerKernels()))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(tf.cast(ours, tf.float32), tf.cast(theirs, tf.float32))


@pytest.mark.parametrize(
    "shape, layer",
    [
        ((64, 64, 1), layers.Conv2D(2, 1, dtype="mixed_bfloat16")),
        ((4096, 1), layers.Dense(2, dtype="mixed_bfloat16")),
        ((4096, 1), layers.EinsumDense("abc,cd->abd", (None, 2), bias_axes="d", dtype="mixed_bfloat16")),
        # As in attention with one head.
        ((4096, 1), layers.EinsumDense("abc,cde->abde", (None, 1, 2), bias_axes="de", dtype="mixed_bfloat16")),
    ],
    ids=["convolution", "dense", "einsum", "one head"],
)
def test_gradients_of_biases_are_exact_sums(shape, layer):
    """Gradients of biases and kernels are sums of 4096 ones; in bfloat16 such a sum would stop at 256."""
    model = stacked(shape, layer)
    kernels = StepOptions(precision="bfloat16", tuned_for_cpu=False).kernels(
        Devices(towers=(CPU,), parameters=CPU)
    )
    outputs, _, *found = traced_passes(model, kernels)(tf.ones([1, *shape], tf.bfloat16))
    assert outputs.dtype == tf.bfloat16
    for gradient in found:
        np.testing.assert_array_equal(tf.cast(gradient, tf.float32), np.full(gradient.shape, 4096))


@pytest.mark.parametrize(
    "layer, expected",
    [
        (layers.Conv2D(3, 3, dtype="mixed_bfloat16"), 1),
        (layers.Conv2D(3, 3, dtype="float32"), 0),
        (layers.Conv2D(3, 3, dtype="float64"), 0),
        (layers.DepthwiseConv2D(3, dtype="mixed_bfloat16"), 1),
        (layers.Conv2D(3, 3, dtype="mixed_bfloat16", data_format="channels_first"), 0),
        (OwnDense(3, dtype="mixed_bfloat16"), 0),
    ],
    ids=["bfloat16", "float32", "float64", "depthwise", "channels first", "subclass"],
)
def test_which_layers(layer, expected):
    model = stacked((6, 6, 4), layer)
    lines = KERNELS.notices(model)
    wanted = (
        "1 Conv and Dense layer multiplying in float32: this CPU is no faster in the shorter format "
        "(tuned_for_cpu=False disables this)"
    )
    assert lines == [wanted] * expected
    types = [(node.op, node.attr["T"].type) for node in graph_of(model).node]
    short = tf.bfloat16.as_datatype_enum
    products = [dtype for op, dtype in types if "Conv" in op or op == "MatMul"]
    assert products and (short not in products) == (expected or "float" in layer.compute_dtype[:5])


def test_sparse_inputs_and_calls_of_the_users_own_stay():
    layer = layers.Dense(2, dtype="mixed_bfloat16", kernel_initializer="ones")
    model = keras.Sequential([keras.Input((3,), sparse=True, dtype="bfloat16"), layer])
    with KERNELS.in_place(model):
        assert float(model(tf.sparse.from_dense(tf.ones([1, 3], tf.bfloat16)))[0, 0]) == 3
    layer.__dict__["call"] = lambda inputs, training=None: tf.zeros([1, 2], tf.bfloat16)
    with KERNELS.in_place(model):
        assert float(layer(tf.ones([1, 3], tf.bfloat16))[0, 0]) == 0


@pytest.mark.full
def test_convolutions_may_be_winograd_s():
    kernels = LayerKernels(float32_products=True, winograd_channels=4)
    model = stacked((8, 8, 4), layers.Conv2D(4, 3, padding="same", dtype="mixed_bfloat16"))
    types = {node.op for node in graph_of(model, kernels).node}
    assert not any("Conv2D" in op for op in types) and "PartitionedCall" in types
    assert any("1 Conv2D layer by Winograd" in line for line in kernels.notices(model))


@pytest.mark.parametrize("kind", ["convolution", "dense"])
def test_each_product_is_computed_once_and_named_after_its_layer(kind):
    layer = layers.Conv2D(4, 3, name="inner") if kind == "convolution" else layers.Dense(4, name="inner")
    layer.dtype_policy = "mixed_bfloat16"
    model = stacked((6, 6, 4), layer)
    nodes = graph_of(model).node
    names = [node.name for node in nodes if node.op.startswith("Conv2D") or "MatMul" in node.op]
    assert sorted("gradient_tape/" in name for name in names) == [False, True, True]
    assert all("/inner" in name for name in names)


def test_the_backward_pass_widens_again(monkeypatch):
    """No Cast is used by both passes: float32 inputs kept from the forward pass would take twice the memory.

    TensorFlow's graph optimizer joins operations with the same inputs.
    """
    monkeypatch.setattr(graph_optimizer, "must_optimize", lambda concrete: True)
    nodes = graph_of(stacked((6, 6, 4), layers.Conv2D(4, 3, dtype="mixed_bfloat16"))).node
    casts = {
        node.name for node in nodes if node.op == "Cast" and node.attr["DstT"].type == tf.float32.as_datatype_enum
    }
    users = [
        {source.split(":")[0] for source in node.input} & casts for node in nodes if node.op.startswith("Conv2D")
    ]
    assert len(users) == 3
    forward, *backward = users
    assert forward and all(backward) and not forward & (backward[0] | backward[1])


@pytest.mark.parametrize("mode", first_quick(["two towers", "recomputation", "slices", "split backward passes"]))
def test_a_run_has_the_same_numbers(monkeypatch, mode):
    """The updates of 5 steps with the kernels are those of float32, up to bfloat16's rounding (2^-8 a number).

    TensorFlow's own products in bfloat16 are no better reference: on a CPU with AVX2 alone both are 3% away from
    float32. `test_compiled_relu.py` tests that the other modes replace kernels.
    """
    monkeypatch.setattr(options, "runs_onednn", lambda: True)

    def run(strategy):
        assert any("multiplying in float32" in line for line in strategy.notices)
        with recorded_graphs() as graphs:
            strategy.run_steps(5)
        products = [node for node in graphs.nodes if "Conv2D" in node.op or "MatMul" in node.op]
        assert {node.attr["T"].type for node in products} == {tf.float32.as_datatype_enum}

    of_kernels = {"channels": 8, "split_of_one": "output_channels", "precision": "bfloat16"}
    found = updates_in(mode, ["avx2", "avx512f"], run, **of_kernels)
    assert_close(found, updates_by_tensorflow(8, 5), 4e-2)
