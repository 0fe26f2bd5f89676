"""Flags that belong together, by name: --recipe gives them, and what else is given comes first."""

from collections.abc import Mapping
from types import MappingProxyType

from absl import flags

from launch.flags.checks import listed_in_help

FLAGS = flags.FLAGS
RECIPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        # After Jordan 2024 (arXiv:2404.00498, airbench94), in its numbers but for 0.4 epochs more: a rate of 11.5
        # for sums over batches of 1024 under momentum 0.85 is 1.5 for means.
        "cifar_fast": {
            "task": "cifar10",
            "model": "cifar_fast",
            "batch_size": 1024,
            "epochs": 10.3,
            "evaluate_every_epochs": None,
            "optimizer": "nesterov",
            "momentum": 0.85,
            "learning_rate": 1.5,
            "schedule": "triangular",
            "weight_decay": 0.0089,
            "decay_all": True,
            "norm_bias_rate_factor": 64.0,
            "lookahead_every": 5,
            "label_smoothing": 0.2,
            "crop_padding": 2,
            "crop_fill": "reflect",
            "flip": "alternating",
            "precision": "bfloat16",
        },
    }
)

flags.DEFINE_enum("recipe", None, list(RECIPES), "Defaults for other flags that belong together.")
listed_in_help(__name__)


def apply_recipe() -> None:
    """Sets the flags of --recipe that were not given."""
    for name, value in RECIPES.get(FLAGS.recipe, {}).items():
        # Of a length, only one may stand.
        if FLAGS[name].present or (name == "epochs" and FLAGS["steps"].present):
            continue
        FLAGS[name].value = value
