"""Mechanisms on the devices of one process: tensors and device names, no cluster, flags or files."""

import importlib

from towers.hardware.fast_kernels import use_fast_kernels

# Before any module here, or of the packages above, imports TensorFlow.
use_fast_kernels()

# The only place with the version: setup.cfg, summary.json and the doctor read it here.
__version__ = "0.1.0"

_HOMES = {
    "Batch": "towers.task",
    "Devices": "towers.devices",
    "InputShard": "towers.task",
    "StepOptions": "towers.options",
    "Task": "towers.task",
    "UserError": "towers.errors",
    "WeightedLoss": "towers.task",
    "WeightedValue": "towers.task",
    "configure_devices": "towers.device_setup",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    """Imports a public name at its first use: importing `towers.errors` alone does not import TensorFlow."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
