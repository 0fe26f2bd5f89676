"""A weight that a `tf.function` of the model keeps is refused in every kind of tower."""

import pytest
import tensorflow as tf
from keras import layers

from strategies.registry import build_strategy
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, stacked, vectors
from tests.towers.user_errors import refused
from towers.options import StepOptions


class Scaled(layers.Layer):
    """Multiplies its inputs by a weight in a function that is traced only once, while the model is built."""

    def build(self, shape):
        self.factor = self.add_weight(shape=shape[-1:], initializer="ones", trainable=False, name="factor")
        self.traced = tf.function(lambda inputs: inputs * self.factor)

    def call(self, inputs):
        return self.traced(inputs)


def task_with(scaled: Scaled) -> TinyTask:
    def build():
        return stacked((4,), layers.Dense(4), scaled, layers.Dense(NUM_CLASSES))

    return TinyTask(build=build, examples=vectors(8))


@pytest.mark.parametrize(
    "name, devices", [("towers", cpus(1)), ("slices", cpus_in_groups("slice:2")), ("pipeline", cpus(2))]
)
def test_a_weight_in_a_function_of_the_model(name, devices):
    strategy = build_strategy(name, task_with(Scaled(name="scaled")), devices, StepOptions())
    with refused("scaled/factor is used in a tf.function", "remove the tf.function"):
        strategy.run_steps(1)


def test_a_frozen_layer_may_be_a_function():
    """Its weights never change, like those of a SavedModel in a `TFSMLayer`."""
    strategy = build_strategy("towers", task_with(Scaled(name="scaled", trainable=False)), cpus(1), StepOptions())
    assert strategy.run_steps(1).num_steps == 1
