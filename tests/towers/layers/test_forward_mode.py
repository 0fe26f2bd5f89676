"""A layer that takes forward-mode derivatives (`tf.autodiff.ForwardAccumulator`) of layers with our kernels."""

import dataclasses

import keras
import pytest
import tensorflow as tf
from keras import layers

from strategies.registry import build_strategy
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, assert_close, images, parameters_of, stacked
from towers.hardware.cpu_instructions import AVX2
from towers.layers.convolutions import winograd
from towers.options import StepOptions


class Followed(layers.Layer):
    """The sum of its parts' outputs and of their derivatives in one direction."""

    def __init__(self, *parts, **named):
        super().__init__(**named)
        self.parts = list(parts)

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
            shape = part.compute_output_shape(shape)

    def call(self, inputs, training=False):
        with tf.autodiff.ForwardAccumulator(inputs, tf.ones_like(inputs)) as followed:
            outputs = inputs
            for part in self.parts:
                outputs = part(outputs)
        return outputs + followed.jvp(outputs)


def network() -> keras.Model:
    parts = [
        layers.Conv2D(32, 3, padding="same", name="convolution"),
        layers.BatchNormalization(name="norm"),
        layers.Activation("gelu"),
    ]
    return stacked(
        (8, 8, 3),
        layers.Conv2D(32, 1, name="wide"),
        Followed(*parts, name="followed"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(NUM_CLASSES, name="logits"),
    )


@pytest.mark.full
def test_a_layer_may_take_derivatives_forward(monkeypatch):
    monkeypatch.setattr(winograd, "_FEWEST_PIXELS", 1)
    examples = images(8)
    examples = examples._replace(features=tf.image.resize(examples.features, (8, 8)).numpy())
    found = {}
    for tuned in (False, True):
        devices = dataclasses.replace(cpus(1), threads_per_tower=1, cpu_instructions=frozenset({AVX2}))
        task = TinyTask(build=network, examples=examples)
        strategy = build_strategy(
            "towers", task, devices, StepOptions(tuned_for_cpu=tuned, fused_batch_norm=tuned)
        )
        strategy.run_steps(3)
        found[tuned] = parameters_of(strategy)
    assert_close(found[True], found[False])
