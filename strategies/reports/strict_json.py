"""JSON as its standard has it: NaN and infinity, which it does not know, are written as null."""

import json
from collections.abc import Mapping


def dumps(value, *, indent: int | None = None) -> str:
    """The text of `value`; what JSON has no type for (paths, say) is written as its str()."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def _finite(value):
    if isinstance(value, Mapping):
        return {name: _finite(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
