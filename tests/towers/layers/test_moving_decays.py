"""The decays of batch norms' moving statistics, found while a model is traced."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from towers.layers.kernels import DEFAULT_KERNELS, LayerKernels
from towers.layers.moving_decays import noted_decays
from towers.task import Batch
from towers.tower import run_model


class OwnNorm(layers.BatchNormalization):
    """A batch norm with unknown arithmetic of its own."""

    def call(self, inputs, training=None, mask=None):
        return inputs


def model() -> keras.Model:
    inputs = layers.Input((4,))
    twice = layers.BatchNormalization(momentum=0.9, name="twice")
    outputs = layers.BatchNormalization(momentum=0.8, epsilon=1e-7, name="once")(twice(twice(inputs)))
    nested = keras.Sequential([layers.Input((4,)), layers.BatchNormalization(momentum=0.7, name="nested")])
    outputs = layers.BatchNormalization(trainable=False, name="frozen")(nested(outputs))
    outputs = layers.BatchNormalization(renorm=True, name="renorm")(OwnNorm(name="own")(outputs))
    return keras.Model(inputs, layers.Dense(1)(outputs))


@pytest.mark.parametrize(
    "kernels", [DEFAULT_KERNELS, LayerKernels(fused_batch_norm=False)], ids=["fused", "keras"]
)
def test_a_layer_keeps_its_momentum_for_each_call(kernels):
    built, batch = model(), Batch(tf.ones([3, 4]), ())
    variables = built.non_trainable_variables
    with noted_decays(built) as decays:
        run_model(built, [(v, v.value) for v in built.variables], variables, batch, True, kernels)
    found = {"/".join(v.path.split("/")[-2:]): decays[id(v)] for v in variables if id(v) in decays}
    expected = {"twice": 0.9 * 0.9, "once": 0.8, "nested": 0.7}
    assert found == {
        f"{name}/{kind}": decay for name, decay in expected.items() for kind in ("moving_mean", "moving_variance")
    }
