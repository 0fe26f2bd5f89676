"""The networks by name. To add one: write its file, add its row."""

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import keras

from models.networks.alexnet import alexnet
from models.networks.cifar_fast import cifar_fast
from models.networks.classic_cnn import classic_cnn
from models.networks.inception import inception
from models.networks.resnet import resnet
from models.networks.vgg import vgg16
from towers.errors import UserError

NETWORKS: Mapping[str, Callable[..., keras.Model]] = MappingProxyType(
    {
        "classic_cnn": classic_cnn,
        "alexnet": alexnet,
        "vgg16": vgg16,
        "resnet20": functools.partial(resnet, 20),
        "resnet32": functools.partial(resnet, 32),
        "resnet56": functools.partial(resnet, 56),
        "resnet110": functools.partial(resnet, 110),
        "inception": inception,
        "cifar_fast": cifar_fast,
    }
)


def network_names() -> tuple[str, ...]:
    """Gives the names that `build_network` takes."""
    return tuple(NETWORKS)


def build_network(name: str, *, image_shape: Sequence[int], num_classes: int) -> keras.Model:
    """Builds the network called `name`, with fresh weights drawn from Keras's seed.

    The variables' paths depend on the name alone, whatever was built before: checkpoints are keyed by them.

    Args:
      name: one of `network_names()`.
      image_shape: (height, width, channels) in pixels.
      num_classes: how many logits an image gets.

    Returns:
      A functional model: float32 images [N, H, W, C], normalised, to float32 logits [N, num_classes].

    Raises:
      UserError: the name is unknown, or a size is not a whole number of at least 1.
    """
    if name not in NETWORKS:
        raise UserError(_unknown_name(name))
    if len(image_shape) != 3 or not all(_is_size(size) for size in image_shape):
        raise UserError(
            f"image_shape={image_shape!r}: three whole numbers of at least 1 are needed, "
            "(height, width, channels); pass for example image_shape=(32, 32, 3)"
        )
    if not _is_size(num_classes):
        raise UserError(f"num_classes={num_classes!r}: a whole number of at least 1 is needed; pass e.g. 10")
    model = NETWORKS[name](image_shape=tuple(image_shape), num_classes=num_classes)
    _name_seeds_after_their_layers(model)
    return model


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def _unknown_name(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), NETWORKS, n=1, cutoff=0.0)[0]
    return f"network={name!r}: must be one of {', '.join(NETWORKS)}; did you mean {nearest!r}?"


def _name_seeds_after_their_layers(model: keras.Model) -> None:
    """Makes the paths of dropout seeds stable: `dense1_dropout/seed_generator_state`.

    Keras numbers seed generators over the whole process (`seed_generator_7/...`), a stock Dropout has
    no argument to name its own, and a built layer takes no new one: so the path itself is set.
    A model loaded from a .keras file is numbered again.
    """
    for layer in model.layers:
        generator = getattr(layer, "seed_generator", None)
        if generator is not None:
            generator.name = layer.name
            generator.state._path = f"{layer.name}/{generator.state.name}"
