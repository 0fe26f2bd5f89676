"""Shadowed attributes of layers are restored at the end."""

import pytest
from keras import layers

from tests.towers.tiny_tasks import stacked
from towers.layers.shadowing import shadowed


def some_layer():
    return stacked((3,), layers.Dense(2, "gelu")).layers[-1]


def other(*_):
    return None


@pytest.mark.parametrize("name", ["call", "activation"], ids=["method", "attribute"])
def test_an_attribute_is_restored(name):
    layer = some_layer()
    before = getattr(layer, name)
    with shadowed([(layer, name, other)]):
        assert getattr(layer, name) is other
    assert getattr(layer, name) == before
    assert (name in layer.__dict__) == (name == "activation")


def test_all_attributes_are_restored_after_an_error():
    layer = some_layer()
    before = layer.activation
    with pytest.raises(RuntimeError), shadowed([(layer, "activation", other), (layer, "call", other)]):
        raise RuntimeError
    assert layer.activation is before and "call" not in layer.__dict__


def test_an_attribute_that_is_shadowed_twice_is_restored():
    layer = some_layer()
    before = layer.activation
    with shadowed([(layer, "activation", other), (layer, "activation", print)]):
        assert layer.activation is print
    assert layer.activation is before
