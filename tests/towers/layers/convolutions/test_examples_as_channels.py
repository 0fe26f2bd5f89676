"""Kernels' gradients with examples as channels: Keras's sums; which convolutions get them."""

import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.tiers import first_quick
from tests.towers.layers.convolutions.convolution_gradients import (
    convolution,
    gradients,
    operations_of_gradients,
    small_whole_numbers,
)
from tests.towers.tiny_tasks import (
    NUM_CLASSES,
    TinyTask,
    assert_close,
    images,
    parameters_of,
    stacked,
    trainer_of,
)
from towers.layers.convolutions import examples_as_channels
from towers.layers.kernels import LayerKernels

KERNELS = LayerKernels(examples_as_channels=True)
DTYPES = ("bfloat16", "float32")
NUM_FILTERS = 6


@pytest.fixture
def few_channels(monkeypatch):
    """Uses the kernels for few channels too, because the tests' arrays are small."""
    for rows in ("_FLOAT32", "_BFLOAT16"):
        monkeypatch.setattr(examples_as_channels, rows, (examples_as_channels._Row(1, math.inf),))


def assert_as_keras(shape, kernel, stride, dtype, count, kernels):
    """Keras computes in float32: in bfloat16 oneDNN omits parts of some gradients (`examples_as_channels.py`)."""
    outputs = [-(-size // stride) for size in shape[:2]]
    inputs, upstream = (small_whole_numbers((count, *each), 1, dtype) for each in (shape, (*outputs, NUM_FILTERS)))
    ours = convolution(shape, NUM_FILTERS, kernel, stride=stride, dtype=dtype)
    theirs = convolution(shape, NUM_FILTERS, kernel, stride=stride, dtype="float32")
    found = gradients(ours, inputs, upstream, kernels)
    expected = gradients(theirs, *(tf.cast(one, tf.float32) for one in (inputs, upstream)), LayerKernels())
    for one, another in zip(found, expected, strict=True):
        assert one.dtype == dtype
        np.testing.assert_array_equal(tf.cast(one, tf.float32), another)


SIZES = [(10, 7), (1, 1), (3, 3), (8, 8), (5, 2)]
WINDOWS = [(3, 1), (5, 1), ((1, 3), 1), ((3, 1), 1), (3, 2), (5, 3), (3, 3)]  # kernels and strides
QUICK = [
    *((10, 7, 9, *window, "bfloat16") for window in WINDOWS),
    *((10, 7, 9, *window, "float32") for window in ((3, 1), (5, 3))),
    *((1, 1, 1, *window, "bfloat16") for window in ((3, 1), (3, 2))),
]
EVERY = [
    (*size, count, *window, dtype)
    for size, count, window, dtype in itertools.product(SIZES, (1, 9), WINDOWS, DTYPES)
]


@pytest.mark.usefixtures("few_channels")
@pytest.mark.parametrize(
    "height, width, count, kernel, stride, dtype",
    first_quick([*QUICK, *(case for case in EVERY if case not in QUICK)], len(QUICK)),
    ids=str,
)
def test_as_keras(height, width, count, kernel, stride, dtype):
    shape = height, width, 4
    model = convolution(shape, NUM_FILTERS, kernel, stride=stride, dtype=dtype)
    operations = operations_of_gradients(model, tf.TensorSpec([None, *shape], dtype), KERNELS)
    assert all(operation.type != "Conv2DBackpropFilter" for operation in operations)
    assert_as_keras(shape, kernel, stride, dtype, count, KERNELS)


@pytest.mark.usefixtures("few_channels")
@pytest.mark.parametrize(
    "count, dtype",
    first_quick(
        [
            (3, "bfloat16"),
            (31, "float32"),
            *((count, "bfloat16") for count in (1, 31, 64)),
            *((count, "float32") for count in (1, 3, 64)),
        ],
        2,
    ),
)
def test_in_parts_as_keras(monkeypatch, count, dtype):
    """The usual 64 examples are four parts of 16; with fewer than four examples some parts are empty."""
    shape = 5, 5, 4
    bytes_of_example = tf.as_dtype(dtype).size * 5 * 5 * (4 + NUM_FILTERS)
    monkeypatch.setattr(examples_as_channels, "_MOST_BYTES", 16 * bytes_of_example)
    kernels = LayerKernels(examples_as_channels=True, num_examples=64)
    model = convolution(shape, NUM_FILTERS, 3, dtype=dtype)
    operations = operations_of_gradients(model, tf.TensorSpec([None, *shape], dtype), kernels)
    assert sum(operation.type == "Conv2D" for operation in operations) == 1 + 4
    assert_as_keras(shape, 3, 1, dtype, count, kernels)


@pytest.mark.parametrize(
    "num_examples, expected", [(1, 1), (100, 1), (101, 2), (128, 2), (200, 2), (512, 8), (768, 8), (1024, 16)]
)
def test_parts_are_of_multiples_of_16_examples_where_twice_as_many_suffice(monkeypatch, num_examples, expected):
    monkeypatch.setattr(examples_as_channels, "_MOST_BYTES", 1000)
    assert examples_as_channels._num_parts(num_examples, 10) == expected


@pytest.mark.parametrize(
    "shape, filters, stride, dtype, expected",
    [
        ((8, 8, 64), 64, 1, "bfloat16", True),
        ((16, 16, 128), 64, 1, "bfloat16", True),
        ((8, 8, 32), 64, 1, "bfloat16", True),
        ((16, 16, 32), 64, 2, "bfloat16", True),
        ((16, 16, 32), 64, 1, "bfloat16", False),
        ((8, 8, 16), 64, 1, "bfloat16", False),
        ((8, 8, 64), 16, 1, "bfloat16", False),
        ((64, 64, 64), 64, 1, "bfloat16", False),
        ((None, 4, 64), 64, 1, "bfloat16", False),
        ((3, 1, 4), 4, 2, "bfloat16", True),
        ((3, 2, 4), 4, 2, "bfloat16", True),
        ((3, 3, 4), 4, 2, "bfloat16", False),
        ((3, 1, 4), 4, 1, "bfloat16", False),
        ((3, 1, 4), 4, 2, "float32", False),
        ((3, 3, 64), 64, 1, "float32", True),
        ((6, 6, 64), 64, 2, "float32", True),
        ((4, 4, 64), 64, 1, "float32", False),
        ((3, 3, 32), 64, 1, "float32", False),
        ((3, 3, 64), 64, 1, "float16", False),
    ],
)
def test_for_which_convolutions(shape, filters, stride, dtype, expected):
    model = convolution(shape, filters, 3, stride=stride, dtype=dtype)
    operations = operations_of_gradients(model, tf.TensorSpec([None, *shape], dtype), KERNELS)
    assert any(operation.type == "Conv2DBackpropFilter" for operation in operations) is not expected


@pytest.mark.parametrize(
    "shape, given, expected",
    [
        ((8, 8, 64), {"num_threads": 1}, True),
        ((8, 8, 64), {"num_threads": 2}, False),
        ((8, 8, 64), {}, False),
        ((8, 8, 64), {"num_threads": 1, "num_examples": 8}, False),
        ((4, 4, 64), {"num_threads": 2, "num_examples": 32}, True),
        ((8, 8, 128), {"num_threads": 2, "num_examples": 8}, True),
        ((15, 15, 128), {"num_threads": 1}, False),
        ((14, 14, 256), {}, True),
        ((16, 16, 256), {}, False),
        ((8, 8, 32), {"num_threads": 1}, False),
    ],
)
def test_fewer_convolutions_gain_with_amx(shape, given, expected):
    kernel = (3, 3, shape[-1], shape[-1])
    assert examples_as_channels.Gate(amx=True, **given).takes((None, *shape), "bfloat16", kernel) is expected
    assert examples_as_channels.Gate(amx=True, **given).takes((None, 3, 1, 4), "bfloat16", (3, 3, 4, 4), stride=2)


@pytest.mark.usefixtures("few_channels")
def test_gradients_of_gradients_and_jacobians_are_tensorflows():
    model = convolution((4, 4, 2), 3, 3, stride=2, dtype="float32")
    inputs = tf.constant(np.random.default_rng(0).normal(size=(3, 4, 4, 2)), tf.float32)
    (kernel, _) = model.trainable_variables

    def found_by(kernels):
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(inputs)
            with tf.GradientTape() as inner, kernels.in_place(model):
                outputs = tf.square(model(inputs))
            of_kernel = inner.gradient(outputs, kernel)
            squared = tf.reduce_sum(tf.square(of_kernel))
            sums = tf.reduce_sum(outputs, [1, 2, 3])
        return [of_kernel, *outer.gradient(squared, [inputs, kernel]), outer.jacobian(sums, kernel)]

    found, expected = (tf.function(found_by, autograph=False)(one) for one in (KERNELS, LayerKernels()))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def network() -> keras.Model:
    return stacked(
        (6, 6, 3),
        layers.Conv2D(4, 3, padding="same", name="one"),
        layers.ReLU(),
        layers.Conv2D(4, 3, padding="same", name="two"),
        layers.Flatten(),
        layers.Dense(NUM_CLASSES, name="logits"),
    )


@pytest.mark.full
@pytest.mark.usefixtures("few_channels")
def test_a_run_has_the_same_numbers():
    """Two towers with parts of different sizes. With bfloat16 another order of sums rounds differently."""
    found = []
    for tuned in (True, False):
        task = TinyTask(build=network, examples=images(21), batch_size=7)
        strategy = trainer_of(task, 2, tuned_for_cpu=tuned, precision="bfloat16", rate=0.02)
        strategy.run_steps(10)
        found.append(parameters_of(strategy))
    assert_close(*found, 0.02)
