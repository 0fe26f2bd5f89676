"""--recipe: named sets of flags. Flags on the command line override the recipe's.

Tried for CIFAR-10 (JPEG copy, held-out accuracy; 3 to 4 points below that on clean training images). ResNet-20, 10
epochs: Nesterov at best 0.8445 (bfloat16, crop_padding=2, label_smoothing=0.1, rate 0.3; rate 0.4 0.8426, float32
0.844), without these at most 0.838; batch 64, twice the decay, zero-initialised last gammas, and batch norm in the
shortcuts gained nothing. Muon with fixed kernel norms, as published for airbench: rate 0.06 0.842, 0.03 0.853,
0.02 0.856; with decoupled decay 0.015 instead, as in `towers.updates.rules`, 0.853. `cifar_fast`: Muon at rate
0.24, momentum 0.6, decay 0.083 was behind SGD after two epochs (training accuracy 0.73 and 0.76); new batch
statistics after the run, over twelve batches, changed -0.06 to +0.04 points.
"""

from collections.abc import Mapping
from types import MappingProxyType

from absl import flags

from launch.flags.checks import listed_in_help
from towers.errors import UserError

FLAGS = flags.FLAGS
RECIPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        # Jordan 2024 (arXiv:2404.00498, airbench94), with the same numbers except for 0.4 more epochs. Its rate of
        # 11.5 is for gradients summed over batches of 1024 with momentum 0.85; for mean gradients that is 1.5.
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
            "precision": "auto",
        },
    }
)

flags.DEFINE_enum(
    "recipe",
    None,
    list(RECIPES),
    "Named set of defaults for other flags; flags on the command line override it. cifar_fast: a small network "
    "that trains on CIFAR-10 in 10.3 epochs.",
)
listed_in_help(__name__)


def apply_recipe() -> None:
    """Sets the flags of --recipe that are not on the command line.

    Raises:
      UserError: the program lacks one of the flags, as a user's own program lacks those of tasks.
    """
    recipe = RECIPES.get(FLAGS.recipe, {})
    if missing := [name for name in recipe if name not in FLAGS]:
        raise UserError(
            f"--recipe={FLAGS.recipe} sets --{missing[0]}, which this program does not have: a recipe is for "
            "the tasks of launch.train; omit it and give the other flags one by one"
        )
    for name, value in recipe.items():
        # --steps and --epochs exclude each other.
        if FLAGS[name].present or (name == "epochs" and FLAGS["steps"].present):
            continue
        FLAGS[name].value = value
