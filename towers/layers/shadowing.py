"""Temporarily replaces attributes of a model's layers."""

import contextlib
from collections.abc import Iterable
from typing import Any

import keras

_ABSENT = object()


@contextlib.contextmanager
def shadowed(attributes: Iterable[tuple[keras.layers.Layer, str, Any]]):
    """Context manager: sets an attribute for each (layer, name, value), and restores the old values. Can nest.

    It writes to `__dict__`, because `Layer.__setattr__` would track the value as part of the model.
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
