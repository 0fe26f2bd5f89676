"""The modes of training, behind one contract, and the Trainer that runs any of them."""

import importlib

# Chooses TensorFlow's kernels before a module of this package imports TensorFlow.
import towers  # noqa: F401

_HOMES = {
    "Callback": "strategies.callbacks",
    "NonFiniteStep": "strategies.errors",
    "StepReport": "strategies.contract",
    "Strategy": "strategies.contract",
    "Trainer": "strategies.training.trainer",
    "TrainerOptions": "strategies.training.trainer_options",
    "build_strategy": "strategies.registry",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    """A public name, imported at its first use: importing `strategies.cluster` does not import TensorFlow."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
