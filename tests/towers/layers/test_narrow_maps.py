"""Kernels' gradients over small images, side by side or as channels: the same sums as in Keras's convolution."""

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
    images,
    parameters_of,
    stacked,
    trainer_of,
)
from towers.layers import narrow_maps
from towers.layers.kernels import LayerKernels

SIDE_BY_SIDE, AS_CHANNELS = LayerKernels(images_side_by_side=True), LayerKernels(examples_as_channels=True)


def small_whole_numbers(shape, seed) -> tf.Tensor:
    """-1, 0 and 1: no sum over them is rounded in bfloat16 as long as it is at most 256."""
    return tf.constant(np.random.default_rng(seed).integers(-1, 2, shape), tf.bfloat16)


def gradients(model, inputs, upstream, kernels):
    """Gradients of inputs, kernel and bias, in the inputs' dtype."""
    values = [tf.cast(variable, inputs.dtype) for variable in model.trainable_variables]
    mapping = zip(model.trainable_variables, values, strict=True)
    with (
        tf.GradientTape() as tape,
        keras.StatelessScope(state_mapping=list(mapping)),
        kernels.in_place(model),
    ):
        tape.watch([inputs, *values])
        outputs = model(inputs)
    return [outputs, *tape.gradient(outputs, [inputs, *values], upstream)]


@pytest.mark.parametrize("kernels", [SIDE_BY_SIDE, AS_CHANNELS], ids=["side by side", "as channels"])
@pytest.mark.parametrize("kernel", [3, 5, (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("count", [1, 4, 9])
@pytest.mark.parametrize("height, width", first_quick([(20, 7), (1, 1), (3, 3), (7, 7), (8, 8), (5, 2)], 2))
def test_as_keras(height, width, count, kernel, kernels, monkeypatch):
    monkeypatch.setattr(narrow_maps, "_FEWEST_CHANNELS", 1)
    shape = (height, width, 4)
    layer = layers.Conv2D(
        6,
        kernel,
        padding="same",
        dtype="bfloat16",
        kernel_initializer=lambda shape, dtype: tf.cast(small_whole_numbers(shape, 3), dtype),
    )
    model = stacked(shape, layer)
    inputs, upstream = small_whole_numbers((count, *shape), 1), small_whole_numbers((count, height, width, 6), 2)
    found, expected = (gradients(model, inputs, upstream, one) for one in (kernels, LayerKernels()))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(tf.cast(ours, tf.float32), tf.cast(theirs, tf.float32))


@pytest.mark.parametrize(
    "height, width, dtype, expected",
    [
        (7, 7, "bfloat16", 32),
        (8, 8, "bfloat16", 36),
        (9, 9, "bfloat16", 9),
        (7, 7, "float32", 7),
        (None, 7, "bfloat16", 7),
        (7, None, "bfloat16", None),
    ],
)
def test_for_which_gradients_images_are_laid_side_by_side(height, width, dtype, expected):
    """`expected` is the width of the input of the kernels' gradient: of one image, or of several side by side."""
    model = stacked((height, width, 4), layers.Conv2D(4, 3, padding="same", dtype=dtype))

    @tf.function(autograph=False)
    def traced(inputs, upstream):
        return gradients(model, inputs, upstream, SIDE_BY_SIDE)

    spec = tf.TensorSpec([None, height, width, 4], dtype)
    graph = traced.get_concrete_function(spec, spec).graph
    (found,) = (op for op in graph.get_operations() if op.type == "Conv2DBackpropFilter")
    assert found.inputs[0].shape[2] == expected


@pytest.mark.parametrize(
    "height, width, channels, filters, dtype, is_convolution",
    [
        (8, 8, 64, 64, "bfloat16", True),
        (3, 3, 256, 256, "bfloat16", True),
        (7, 7, 64, 96, "bfloat16", False),
        (8, 8, 64, 32, "bfloat16", False),
        (8, 8, 32, 64, "bfloat16", False),
        (4, 9, 64, 64, "bfloat16", False),
        (None, 4, 64, 64, "bfloat16", False),
        (8, 8, 64, 64, "float32", False),
    ],
)
def test_for_which_gradients_examples_become_channels(height, width, channels, filters, dtype, is_convolution):
    model = stacked((height, width, channels), layers.Conv2D(filters, 3, padding="same", dtype=dtype))

    @tf.function(autograph=False)
    def traced(inputs, upstream):
        return gradients(model, inputs, upstream, AS_CHANNELS)

    specs = [tf.TensorSpec([None, height, width, size], dtype) for size in (channels, filters)]
    types = [operation.type for operation in traced.get_concrete_function(*specs).graph.get_operations()]
    assert ("Conv2DBackpropFilter" not in types) == is_convolution


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
def test_a_run_has_the_same_numbers():
    """Two towers with parts of different sizes. With bfloat16 another order of sums rounds differently."""
    found = []
    for tuned in (True, False):
        task = TinyTask(build=network, examples=images(21), batch_size=7)
        strategy = trainer_of(task, 2, tuned_for_cpu=tuned, precision="bfloat16", rate=0.02)
        strategy.run_steps(10)
        found.append(parameters_of(strategy))
    assert_close(*found, 0.02)
