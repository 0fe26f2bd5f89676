"""Attributes of a model's layers that are others for a while."""

import contextlib
from collections.abc import Iterable
from typing import Any

import keras

_ABSENT = object()


@contextlib.contextmanager
def shadowed(attributes: Iterable[tuple[keras.layers.Layer, str, Any]]):
    """Within, each (layer, name) is the value beside it; on leaving, what it was. Uses may nest, not overlap.

    `Layer.__setattr__` would track a value; an entry in `__dict__` shadows a method or an attribute and no more.
    """
    before = []
    try:
        for layer, name, value in attributes:
            before.append((layer.__dict__, name, layer.__dict__.get(name, _ABSENT)))
            layer.__dict__[name] = value
        yield
    finally:
        for entries, name, value in reversed(before):
            if value is _ABSENT:
                del entries[name]
            else:
                entries[name] = value
