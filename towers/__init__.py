"""Mechanisms on the devices of one process. Knows tensors and device names: no cluster, flags or files."""

import importlib

_HOMES = {
    "Batch": "towers.task",
    "Devices": "towers.devices",
    "InputShard": "towers.task",
    "StepOptions": "towers.options",
    "Task": "towers.task",
    "UserError": "towers.errors",
    "WeightedLoss": "towers.task",
    "WeightedValue": "towers.task",
    "configure_devices": "towers.devices",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    """A public name, imported when it is first asked for: who needs `towers.errors` alone needs no TensorFlow."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
