"""Compiled GELU and SiLU: they give Keras's numbers; which layers get them, and which keep Keras's functions."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.tiers import first_quick
from tests.towers.tiny_tasks import (
    NUM_CLASSES,
    TinyTask,
    assert_close,
    parameters_of,
    stacked,
    trainer_of,
    vectors,
)
from towers.layers import compiled_activations
from towers.layers.compiled_activations import SMALLEST_SIZE, activations_to_compile, padded_size
from towers.layers.kernels import LayerKernels

ROOT = pathlib.Path(__file__).resolve().parents[3]
TUNED = LayerKernels(compiled_activations=True)
ACTIVATIONS = {"gelu": keras.activations.gelu, "silu": keras.activations.silu}
every_activation = pytest.mark.parametrize("name", ACTIVATIONS)


@pytest.fixture(autouse=True)
def also_for_few_elements(request, monkeypatch):
    """Compiles layers of few elements too, because the tests' arrays are small."""
    if "few_elements" not in request.node.name:
        monkeypatch.setattr(compiled_activations, "FEWEST_ELEMENTS", 1)


@pytest.mark.parametrize(
    "shape, is_compiled", [((511,), False), ((512,), True), ((None, 4), True), ((8, 63), False)]
)
def test_few_elements_keep_keras_function(shape, is_compiled):
    model = stacked(shape, layers.Activation("silu"))
    assert bool(activations_to_compile(model)) == is_compiled
    ((_, _, compiled),) = activations_to_compile(stacked((512,), layers.Activation("silu")))
    traced = tf.function(compiled, input_signature=[tf.TensorSpec([None, *shape])], autograph=False)
    functions = traced.get_concrete_function().graph.as_graph_def().library.function
    assert any(function.attr["_XlaMustCompile"].b for function in functions) == is_compiled


def numbers() -> np.ndarray:
    """Inputs [2, 3, ...] where the functions bend and where they are nearly 0 or x, and exact zeros."""
    return np.concatenate([np.linspace(-12, 12, 595), [0.0, -0.0, 60.0, -60.0, 1e-30]]).reshape(2, 3, 100)


def value_and_gradient(model, inputs, *, kernels):
    with tf.GradientTape() as tape, kernels.in_place(model):
        tape.watch(inputs)
        outputs = model(inputs)
    assert outputs.shape == inputs.shape
    upstream = tf.cast(2.0 + tf.sin(tf.cast(inputs, tf.float64)), outputs.dtype)
    return outputs, tape.gradient(outputs, inputs, upstream)


def passes(name, dtype):
    """Pairs (compiled, exact) of the value and of the gradient."""
    model = stacked((3, 100), layers.Activation(name, dtype=dtype))
    inputs = tf.constant(numbers(), dtype)
    exact = stacked((3, 100), layers.Activation(name, dtype="float64"))
    found = value_and_gradient(model, inputs, kernels=TUNED)
    expected = value_and_gradient(exact, tf.cast(inputs, tf.float64), kernels=LayerKernels())
    assert all(tensor.dtype == dtype for tensor in found)
    return zip((tf.cast(tensor, tf.float64).numpy() for tensor in found), expected, strict=True)


@pytest.mark.parametrize("name", first_quick(ACTIVATIONS))
def test_as_keras(name):
    for found, expected in passes(name, "float32"):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", first_quick(ACTIVATIONS))
def test_in_a_condition(name):
    ((_, _, compiled),) = activations_to_compile(stacked((512,), layers.Activation(name)))

    @tf.function(autograph=False)
    def gradient(activation, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = tf.cond(tf.reduce_sum(x) < 1e9, lambda: activation(x), lambda: x)
        return tape.gradient(outputs, x)

    x = tf.constant(numbers().reshape(1, -1)[:, :512], tf.float32)
    np.testing.assert_allclose(gradient(compiled, x), gradient(ACTIVATIONS[name], x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", first_quick(ACTIVATIONS))
def test_bfloat16_is_rounded_once(name):
    """The value is rounded once, by at most 2^-8; the gradient also has its upstream gradient's rounding."""
    for (found, expected), rounding in zip(passes(name, "bfloat16"), (2.0**-8, 2.0**-7), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1.01 * rounding, atol=2e-6)


@every_activation
def test_float64_keeps_keras_function(name):
    model = stacked((3, 100), layers.Activation(name, dtype="float64"))
    inputs = tf.constant(numbers())
    found, expected = (value_and_gradient(model, inputs, kernels=kernels) for kernels in (TUNED, LayerKernels()))
    np.testing.assert_array_equal(found, expected)


def test_which_layers_are_compiled():
    inner = stacked((4,), layers.Dense(4, "silu", name="inner"))
    model = stacked(
        (4,),
        layers.Dense(4, "gelu", name="dense"),
        layers.Dense(4, "relu", name="one_kernel_already"),
        layers.Dense(4, name="linear"),
        layers.Dense(4, lambda x: keras.activations.gelu(x, approximate=True), name="approximate"),
        inner,
        layers.Reshape((4, 1)),
        layers.LSTM(4, activation="gelu", name="recurrent"),
        layers.Activation("gelu", name="alone"),
    )
    assert [layer.name for layer, *_ in activations_to_compile(model)] == ["dense", "inner", "alone"]


class Unhashable:
    """An activation that is compared by value."""

    def __call__(self, x):
        return x

    def __eq__(self, other):
        raise AssertionError("activations must not be compared")


def test_a_user_s_activation_need_not_be_hashable():
    assert activations_to_compile(stacked((4,), layers.Dense(4, Unhashable()))) == []


def network() -> keras.Model:
    return stacked(
        (4,),
        layers.Dense(6, "gelu", name="one"),
        layers.Reshape((2, 3)),
        layers.TimeDistributed(layers.Dense(5, "silu", name="each"), name="two"),
        layers.Flatten(),
        layers.Dense(NUM_CLASSES, name="logits"),
    )


@pytest.mark.full
@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-5), ("bfloat16", 0.03)])
def test_a_run_has_the_same_numbers(precision, tolerance):
    """Batches of 7 over two towers, so that the function is compiled for two lengths."""
    found = []
    for tuned in (True, False):
        task = TinyTask(build=network, examples=vectors(21), batch_size=7)
        strategy = trainer_of(task, 2, tuned_for_cpu=tuned, precision=precision)
        strategy.run_steps(20)
        found.append(parameters_of(strategy))
        graph = strategy.engine.graph().as_graph_def()
        compiled = [f for f in graph.library.function if f.attr["_XlaMustCompile"].b]
        assert bool(compiled) == tuned
    assert_close(*found, tolerance)


# --- sequences of variable length


@pytest.mark.parametrize("count", [1, 8191, 8192, 8193, 10_000, 65_535, 65_536, 65_537, 3_000_001, 2**33 - 1])
def test_padded_sizes(count):
    size = int(padded_size(tf.constant(count, tf.int64)))
    assert max(count, SMALLEST_SIZE) <= size <= max(1.25 * count, SMALLEST_SIZE)


def test_there_are_few_padded_sizes():
    counts = tf.range(10_000, 80_000, 7, dtype=tf.int64)
    # In a graph: eagerly map_fn is a loop in Python that takes 45 seconds.
    found = tf.function(lambda: tf.map_fn(padded_size, counts))()
    assert len(set(found.numpy().tolist())) <= 3 * 4 + 1


@pytest.mark.parametrize(
    "length, name",
    first_quick(
        [(1, "silu"), (1500, "gelu"), (1, "gelu"), (1500, "silu"), *((50, name) for name in ACTIVATIONS)], 2
    ),
)
def test_sequences_of_any_length(name, length):
    model = stacked((None, 4), layers.Activation(name))
    inputs = tf.constant(np.random.default_rng(length).normal(size=(2, length, 4)), tf.float32)
    spec = tf.TensorSpec([None, None, 4])

    @tf.function(input_signature=[spec], autograph=False)
    def both(inputs):
        with tf.GradientTape() as tape, TUNED.in_place(model):
            tape.watch(inputs)
            outputs = model(inputs)
        return outputs, tape.gradient(outputs, inputs, inputs)

    with tf.GradientTape() as tape:
        tape.watch(inputs)
        expected = ACTIVATIONS[name](inputs)
    outputs, gradient = both(inputs)
    assert both.get_concrete_function().structured_outputs[0].shape.as_list() == [None, None, 4]
    np.testing.assert_allclose(outputs, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(gradient, tape.gradient(expected, inputs, inputs), rtol=1e-5, atol=1e-5)


COUNTING = """
import pathlib, sys
import keras
import numpy as np
from towers.device_setup import configure_devices
configure_devices(num_towers=1, kind="cpu")
import tensorflow as tf
from tests.towers.tiny_tasks import stacked
from towers.layers.kernels import LayerKernels
model = stacked((None, 64), keras.layers.Activation("gelu"))

@tf.function(input_signature=[tf.TensorSpec([None, None, 64])], autograph=False)
def gradient(inputs):
    with tf.GradientTape() as tape, LayerKernels(compiled_activations=True).in_place(model):
        tape.watch(inputs)
        outputs = model(inputs)
    return tape.gradient(outputs, inputs)

for length in range(20, 40):
    gradient(tf.ones([8, length, 64]))
print(len(list(pathlib.Path(sys.argv[1]).glob("*before_optimizations.txt"))))
"""


@pytest.mark.full
def test_variable_lengths_compile_few_programs(tmp_path):
    """20 lengths, of 10,240 to 19,968 elements, are padded to 5 sizes. XLA writes a file for each program."""
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 2 <= int(done.stdout.split()[-1]) <= 2 * 5
