"""Who cooperates: one file a mode behind one contract, and the Trainer that drives any of them."""

import importlib

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
    """A public name, imported when it is first asked for: who needs `strategies.cluster` needs no TensorFlow."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
