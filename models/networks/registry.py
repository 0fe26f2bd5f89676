"""The networks by name. To add one: write its file, add its row."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import keras
import numpy as np

from models.networks.alexnet import alexnet
from models.networks.cifar_fast import cifar_fast, whitening_weights
from models.networks.classic_cnn import classic_cnn
from models.networks.inception import inception
from models.networks.resnet import resnet
from models.networks.tiny import tiny
from models.networks.vgg import vgg16
from towers.errors import UserError


@dataclasses.dataclass(frozen=True)
class _Network:
    """How to build a network.

    Attributes:
      build: function of (image_shape=..., num_classes=...).
      data_weights: function from normalised training images [N, H, W, C] to the initial weights that are computed
        from them, by variable path; None: all initial weights are drawn.
    """

    build: Callable[..., keras.Model]
    data_weights: Callable[[np.ndarray], Mapping[str, np.ndarray]] | None = None


_NETWORKS: Mapping[str, _Network] = MappingProxyType(
    {
        "tiny": _Network(tiny),
        "classic_cnn": _Network(classic_cnn),
        "alexnet": _Network(alexnet),
        "vgg16": _Network(vgg16),
        "resnet20": _Network(functools.partial(resnet, 20)),
        "resnet32": _Network(functools.partial(resnet, 32)),
        "resnet56": _Network(functools.partial(resnet, 56)),
        "resnet110": _Network(functools.partial(resnet, 110)),
        "inception": _Network(inception),
        "cifar_fast": _Network(cifar_fast, data_weights=whitening_weights),
    }
)


def network_names() -> tuple[str, ...]:
    """Names that `build_network` accepts."""
    return tuple(_NETWORKS)


def weights_from_data(name: str, sample_images: Callable[[], np.ndarray]) -> Mapping[str, np.ndarray]:
    """Initial weights that the network computes from training images, by variable path; {} for most networks.

    Pass the result to `build_network`. It can take seconds to compute: if you build the network several times,
    keep the result.

    Args:
      name: one of `network_names()`.
      sample_images: returns the first training images, normalised, float32 [N, H, W, C]. It is called only if the
        network needs them.

    Raises:
      UserError: the name is unknown.
    """
    compute = _network(name).data_weights
    return {} if compute is None else compute(sample_images())


def build_network(
    name: str,
    *,
    image_shape: Sequence[int],
    num_classes: int,
    data_weights: Mapping[str, np.ndarray] | None = None,
) -> keras.Model:
    """Builds the network called `name`, with initial weights drawn from Keras's seed.

    The variables' paths depend on the name alone, not on what was built before: checkpoints are keyed by them.

    Args:
      name: one of `network_names()`.
      image_shape: (height, width, channels) in pixels.
      num_classes: number of logits for each image.
      data_weights: result of `weights_from_data`, which replaces drawn weights; None: all weights are drawn.

    Returns:
      A functional model: float32 images [N, H, W, C], normalised, to float32 logits [N, num_classes].

    Raises:
      UserError: the name is unknown, or a size is not a whole number of at least 1.
    """
    network = _network(name)
    if len(image_shape) != 3 or not all(_is_size(size) for size in image_shape):
        raise UserError(
            f"image_shape={image_shape!r}: must be three whole numbers of at least 1, "
            "(height, width, channels); pass for example image_shape=(32, 32, 3)"
        )
    if not _is_size(num_classes):
        raise UserError(f"num_classes={num_classes!r}: must be a whole number of at least 1; pass for example 10")
    model = network.build(image_shape=tuple(image_shape), num_classes=num_classes)
    _name_seeds_after_their_layers(model)
    variables = {variable.path: variable for variable in model.variables}
    for path, value in (data_weights or {}).items():
        variables[path].assign(value)
    return model


def _network(name: str) -> _Network:
    if name not in _NETWORKS:
        nearest = difflib.get_close_matches(name.lower(), _NETWORKS, n=1, cutoff=0.0)[0]
        raise UserError(f"network={name!r}: must be one of {', '.join(_NETWORKS)}; did you mean {nearest!r}?")
    return _NETWORKS[name]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def _name_seeds_after_their_layers(model: keras.Model) -> None:
    """Makes the paths of dropout seeds stable: `dense1_dropout/seed_generator_state`.

    Keras numbers seed generators over the whole process (`seed_generator_7/...`). A stock Dropout has no argument
    that names its generator, and the generator of a built layer can't be replaced: so this sets the path itself.
    Keras numbers the generators again when it loads the model from a .keras file.
    """
    for layer in model.layers:
        generator = getattr(layer, "seed_generator", None)
        if generator is not None:
            generator.name = layer.name
            generator.state._path = f"{layer.name}/{generator.state.name}"
