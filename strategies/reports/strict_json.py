"""Standard JSON: NaN and infinity, which the standard lacks, are written as null."""

import json
from collections.abc import Mapping

import numpy as np


def dumps(value, *, indent: int | None = None) -> str:
    """The JSON text of `value`; an object without a JSON type (a path, say) is written as its str()."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def _finite(value):
    if isinstance(value, Mapping):
        return {name: _finite(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    if isinstance(value, np.generic):
        return _finite(value.item())
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
