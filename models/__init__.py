"""What is trained: networks (Keras 3, stock layers only), data sets, and the tasks that join them.

Networks of images take normalised float32 images [N, H, W, C] and return float32 logits [N, num_classes];
`models.networks.registry` builds them by name. `models.tasks` names the networks of other tasks. This package
imports `towers`, never `strategies` or `launch`.
"""

import importlib

# Chooses TensorFlow's kernels before a module of this package imports TensorFlow.
import towers  # noqa: F401

_HOMES = {
    "OwnTask": "models.own_task",
    "build_network": "models.networks.registry",
    "build_task": "models.tasks",
    "network_names": "models.networks.registry",
    "task_names": "models.tasks",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    """A public name, imported at its first use: importing `models` does not import TensorFlow."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
