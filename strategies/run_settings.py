"""What a run computes, as plain values by name. A checkpoint holds them: a later run can tell what changed."""

import dataclasses
import re
import zlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Rows of an array that its checksum covers, evenly spaced.
_CHECKED_ROWS = 10_000
_CHECKED_BYTES = 1 << 24
# A longer list is described as an array.
_LONGEST_LIST = 16

Plain = bool | int | float | str | None


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Plain]:
    """Settings as JSON values by dotted name: {'optimizer': 'Momentum', 'optimizer.momentum': 0.9, ...}.

    Args:
      settings: values, dataclasses, mappings and sequences of them, arrays, Keras objects and functions. An array
        is described by its shape and a checksum, a function and any other object by its name.
    """
    found: dict[str, Plain] = {}
    for name, value in settings.items():
        _describe(name, value, found)
    return found


def changes(before: Mapping[str, Plain], now: Mapping[str, Plain]) -> list[str]:
    """The settings of both that differ, as 'batch_size was 32, is 64'."""
    both = [name for name in now if name in before and before[name] != now[name]]
    return [f"{name} was {before[name]}, is {now[name]}" for name in both]


def _describe(name: str, value: Any, found: dict[str, Plain]) -> None:
    if isinstance(value, np.generic):
        value = value.item()
    if name.endswith("_seconds"):
        return  # a deadline decides no number
    if value is None or isinstance(value, bool | int | float | str):
        # A number that JSON can't hold is compared by its text.
        found[name] = value if not isinstance(value, float) or np.isfinite(value) else str(value)
    elif isinstance(value, Mapping):
        found[name] = f"{len(value)} values"
        for key, child in value.items():
            _describe(f"{name}.{key}", child, found)
    elif isinstance(value, list | tuple) and len(value) <= _LONGEST_LIST:
        found[name] = f"{len(value)} values"
        for index, child in enumerate(value):
            _describe(f"{name}.{index}", child, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _describe_fields(name, value, found)
    else:
        found[name] = _name_of(value)


def _describe_fields(name: str, value: Any, found: dict[str, Plain]) -> None:
    """The class's name and the fields; a class of one field is described by this field alone."""
    fields = dataclasses.fields(value)
    if len(fields) == 1:
        _describe(name, getattr(value, fields[0].name), found)
        return
    found[name] = type(value).__name__
    for field in fields:
        _describe(f"{name}.{field.name}", getattr(value, field.name), found)


def _name_of(value: Any) -> str:
    if isinstance(value, tf.data.Dataset):
        return f"a dataset of {int(value.cardinality())} batches of {value.element_spec}"
    if hasattr(value, "shape") or isinstance(value, list | tuple):
        return _described_array(value)
    if hasattr(value, "get_config") and not isinstance(value, keras.Model):
        # Keras's own losses keep their arguments apart from their configuration.
        config = {**value.get_config(), **getattr(value, "_fn_kwargs", {})}
        return f"{type(value).__name__}({config})"
    # Without the address that the text of an object may contain.
    named = getattr(value, "__qualname__", None) or type(value).__name__
    return re.sub(r" at 0x[0-9a-f]+", "", named)


def _described_array(value: Any) -> str:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return type(value).__name__
    described = f"{array.dtype} {list(array.shape)}"
    if array.dtype.hasobject:
        return described
    if array.ndim:
        row_bytes = max(1, array.nbytes // max(1, len(array)))
        rows = max(1, min(_CHECKED_ROWS, _CHECKED_BYTES // row_bytes))
        array = array[:: max(1, -(-len(array) // rows))]
    return f"{described} with checksum {zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"
