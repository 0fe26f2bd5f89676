"""A model that can't compute in a precision is refused in one line; other errors of models are not hidden."""

import keras
import pytest

from strategies.data_checks.built_model import built_model
from tests.towers.tiny_tasks import TinyTask, images
from tests.towers.user_errors import refused

# Compiled as a user's file, because messages name its line.
USERS = """
import keras, tensorflow as tf

class Halves(keras.layers.Layer):
    def call(self, inputs):
        return inputs * tf.constant(0.5)

def build():
    return keras.Sequential([keras.Input((6, 6, 3)), Halves(), keras.layers.Flatten(), keras.layers.Dense(3)])
"""


def task(build) -> TinyTask:
    return TinyTask(build=build, examples=images(4))


@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_a_layer_of_float32_alone(precision):
    users = {"__name__": "own"}
    exec(compile(USERS, "/home/me/own.py", "exec"), users)
    with refused(
        f"can't be built with precision={precision}, only in float32",
        "pass precision=float32 (Input 'y' of 'Mul' Op has type float32",
        f"does not match type {precision} of argument 'x' (/home/me/own.py, line 6))",
    ):
        built_model(task(users["build"]), precision)
    assert built_model(task(users["build"]), "float32").layers[0].name == "halves"


def test_an_error_that_float32_has_too_is_raised_as_it_is():
    def build():
        return keras.Sequential([keras.Input((5,)), keras.layers.Conv2D(3, 1)])

    with pytest.raises(ValueError, match="incompatible") as found:
        built_model(task(build), "bfloat16")
    assert type(found.value) is ValueError


@pytest.fixture
def policy_of_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("precision, words", [("float32", "pass precision=bfloat16 instead"), ("bfloat16", "")])
def test_a_dtype_policy_of_keras_that_has_no_effect(precision, words, policy_of_bfloat16, caplog):
    def build():
        return keras.Sequential([keras.Input((6, 6, 3)), keras.layers.Flatten(), keras.layers.Dense(3)])

    assert built_model(task(build), precision).layers[-1].compute_dtype == precision
    assert words in caplog.text and bool(words) == bool(caplog.records)
