"""Layers whose attributes are others for a while are as they were afterwards."""

import pytest
from keras import layers

from tests.towers.tiny_tasks import stacked
from towers.layers.shadowing import shadowed


def some_layer():
    return stacked((3,), layers.Dense(2, "gelu")).layers[-1]


def other(*_):
    return None


@pytest.mark.parametrize("name", ["call", "activation"], ids=["method", "attribute"])
def test_an_attribute_comes_back(name):
    layer = some_layer()
    before = getattr(layer, name)
    with shadowed([(layer, name, other)]):
        assert getattr(layer, name) is other
    assert getattr(layer, name) == before
    assert (name in layer.__dict__) == (name == "activation")


def test_everything_comes_back_after_an_error():
    layer = some_layer()
    before = layer.activation
    with pytest.raises(RuntimeError), shadowed([(layer, "activation", other), (layer, "call", other)]):
        raise RuntimeError
    assert layer.activation is before and "call" not in layer.__dict__


def test_a_layer_that_is_named_twice_comes_back():
    layer = some_layer()
    before = layer.activation
    with shadowed([(layer, "activation", other), (layer, "activation", print)]):
        assert layer.activation is print
    assert layer.activation is before
