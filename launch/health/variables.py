"""The environment variables that TensorFlow, Keras, CUDA, NCCL, XLA and Slurm read."""

from collections.abc import Mapping

from launch.health.credentials import HIDDEN, names_a_secret
from launch.health.section import Section

PREFIXES = ("TF_", "CUDA_", "NCCL_", "KERAS_", "XLA_", "SLURM_")


def variables(environment: Mapping[str, str]) -> Section:
    """The variables that are set; a value is hidden if its name suggests a credential."""
    facts = {
        name: HIDDEN if names_a_secret(name) else value
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES)
    }
    return Section(facts=facts or {"variables": "none of " + ", ".join(PREFIXES)})
