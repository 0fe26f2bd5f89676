"""Copies of a user's built model: which compute the same, and which are refused."""

import keras
import numpy as np
import pytest

from models.copied_model import copied
from models.own_model import build
from towers.errors import UserError

X = np.linspace(-1, 1, 30, dtype=np.float32).reshape(6, 5)


class Scaled(keras.layers.Layer):
    """A layer whose configuration lacks `width` and renames `scale`, and whose calls change attributes."""

    def __init__(self, scale, width=float("nan"), sizes=(1, 2), **options):
        super().__init__(**options)
        self._scale, self.num_calls, self.seen, self.width = scale, 0, None, width
        self.sizes, self.of_unlike_keys = sizes, {1: "a", "b": 2}
        self.inner = keras.layers.Dense(3)
        self.label = self.inner.name

    def build(self, shape):
        self.inner.build(shape)
        self.built = True

    def call(self, inputs):
        self.num_calls, self.seen = self.num_calls + 1, inputs.shape
        return self._scale * self.inner(inputs)

    def get_config(self):
        return {**super().get_config(), "factor": self._scale, "sizes": list(self.sizes)}

    @classmethod
    def from_config(cls, config):
        return cls(config.pop("factor"), **config)


class Within(keras.layers.Layer):
    """Constructs a layer without a configuration: one of that layer's arguments is an array."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table = Table(np.arange(3.0))

    def build(self, shape):
        self.table.build(shape)
        self.built = True

    def call(self, inputs):
        return self.table(inputs)


class Table(keras.layers.Layer):
    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers

    def build(self, shape):
        self.factor = self.add_weight(shape=shape[-1:])
        self.num_calls = 0

    def call(self, inputs):
        self.num_calls += 1
        return inputs * self.factor * sum(self.numbers)


class Off(keras.layers.Dropout):
    """A dropout whose rate becomes 0 when it is built: the layer has a seed, and its copy has none."""

    def build(self, shape):
        super().build(shape)
        self.rate = 0


@pytest.mark.parametrize(
    "build_layer",
    [
        lambda: Scaled(3.0),
        lambda: Scaled(3.0, sizes=(3, 4)),
        Within,
        lambda: Off(0.5),
        lambda: keras.layers.Masking(float("nan")),
    ],
    ids=["counts", "sizes", "array", "dropout", "nan"],
)
def test_models_whose_copies_compute_the_same_are_not_refused(build_layer):
    model = keras.Sequential([keras.Input((2, 5)), build_layer(), keras.layers.Dense(2)])
    batch = X.reshape(3, 2, 5)
    for _ in range(2):
        expected = model(batch)
    np.testing.assert_array_equal(copied(model)(batch), expected)


def test_what_was_set_later_in_a_layer_within_a_layer_is_not_lost():
    model = keras.Sequential([keras.Input((5,)), Scaled(3.0)])
    copied(model)
    model.layers[0].inner.activation = keras.activations.relu
    model.layers[0].inner.units = 4
    with pytest.raises(UserError, match="loses its units"):
        copied(model)


def test_a_model_with_a_layer_that_its_copy_lacks_is_refused():
    inputs = keras.Input((5,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    model.another = keras.layers.Dense(3)
    with pytest.raises(UserError, match=r"can't be copied \(ValueError\): pass a function"):
        copied(model)


class WithCall(keras.Sequential):
    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs, training=training)


class WithStep(keras.Sequential):
    def train_step(self, data):
        return {"loss": 0.0}


class OfOneSize(keras.Model):
    def __init__(self, units):
        inputs = keras.Input((5,))
        super().__init__(inputs, keras.layers.Dense(units)(inputs))


class OfOneSizeWithCall(OfOneSize):
    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs, training=training, mask=mask)


class OfOneSizeWithStep(OfOneSize):
    def train_step(self, data):
        return {"loss": 0.0}


@pytest.mark.parametrize(
    "kind, given, message",
    [
        (WithCall, [keras.Input((5,)), keras.layers.Dense(2)], "a Sequential without the call.. of WithCall"),
        (WithStep, [keras.Input((5,)), keras.layers.Dense(2)], "WithStep has a train_step.. of its own"),
        (OfOneSizeWithCall, 2, "a Functional without the call.. of OfOneSizeWithCall"),
        (OfOneSizeWithStep, 2, "OfOneSizeWithStep has a train_step.. of its own"),
    ],
)
def test_what_a_models_class_computes_is_not_lost(kind, given, message):
    """Keras's copies of such models are plain ones."""
    with pytest.raises(UserError, match=message):
        build(kind(given))
    plain = build(OfOneSize(2))
    assert plain.count_params() == 12
