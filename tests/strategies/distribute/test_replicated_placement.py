"""Which variables TensorFlow's collectives can send to other workers."""

import keras
import pytest
from keras import layers

from strategies.distribute.replicated_placement import check_sent
from tests.towers.user_errors import refused
from towers.tower import ModelVariables


def variables(dtype: str) -> ModelVariables:
    inputs = keras.Input((2,))
    hidden = layers.Dense(3, name="narrow", dtype=dtype, trainable=False)(inputs)
    return ModelVariables.of(keras.Model(inputs, layers.Dense(2, name="logits", dtype="float32")(hidden)))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_what_can_be_sent(dtype):
    check_sent(variables(dtype))


def test_what_can_not_be_sent_is_named():
    with refused(
        "narrow/kernel in bfloat16, narrow/bias in bfloat16: TensorFlow's collectives", "use engine='own'"
    ):
        check_sent(variables("bfloat16"))
