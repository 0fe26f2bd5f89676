"""The built-in tasks by name. To add one for images: write a function that returns its `ImageSet`, add its row."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from models.clicks_task import ClicksTask
from models.data.augment import PADDING
from models.data.drawn_clicks import DrawnClicks
from models.data.drawn_text import DrawnText
from models.data.image_store import ImageSet
from models.data.shapes import shapes_set
from models.data.tfds_images import cifar10_set, tfds_set
from models.image_task import ImageTask
from models.networks.registry import network_names
from models.networks.transformer import TRANSFORMERS
from models.text_task import TextTask
from towers.errors import UserError

CLICKS, TEXT = "clicks", "text"
DLRM = "dlrm"  # the network of the task 'clicks'
TFDS_PREFIX = "tfds:"
DEFAULT_CACHE_BYTES = 2 << 30


@dataclasses.dataclass(frozen=True)
class _Networks:
    """The networks of a task without images.

    Attributes:
      names: the networks' names, the default first.
      inputs: what the networks take, for messages.
    """

    names: tuple[str, ...]
    inputs: str


_WITHOUT_IMAGES: Mapping[str, _Networks] = MappingProxyType(
    {
        CLICKS: _Networks((DLRM,), "ids"),
        TEXT: _Networks(tuple(TRANSFORMERS), "tokens"),
    }
)

_SETS: Mapping[str, Callable[..., ImageSet]] = MappingProxyType(
    {
        "shapes": lambda **unused: shapes_set(),
        "cifar10": cifar10_set,
    }
)


def task_names() -> tuple[str, ...]:
    """Names that `build_task` accepts; 'tfds:NAME' means any TFDS set of labelled images that is prepared."""
    return (*_SETS, *_WITHOUT_IMAGES, f"{TFDS_PREFIX}NAME")


def default_network(task: str) -> str:
    """The network that the task called `task` trains if none is named."""
    return networks_of(task)[0] if task in _WITHOUT_IMAGES else "resnet20"


def networks_of(task: str) -> tuple[str, ...]:
    """The networks that the task called `task` can train, by name."""
    return _WITHOUT_IMAGES[task].names if task in _WITHOUT_IMAGES else network_names()


def is_augmented(task: str, augment: bool | None) -> bool:
    """Whether the training images of the task called `task` are augmented; `augment` as for `build_task`."""
    return task != "shapes" if augment is None else augment


def build_task(
    name: str,
    *,
    network: str,
    batch_size: int,
    data_dir: str | None = None,
    seed: int = 0,
    augment: bool | None = None,
    eval_batch_size: int | None = None,
    crop_padding: int = PADDING,
    crop_fill: str = "black",
    flip: str = "random",
    label_smoothing: float = 0.0,
    num_input_threads: int = 2,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    image_size: int | None = None,
    clicks: DrawnClicks | None = None,
    click_width: int = 16,
    text: DrawnText | None = None,
    text_dropout: float = 0.0,
) -> ImageTask | ClicksTask | TextTask:
    """Builds the task called `name`. Examples are decoded or drawn at their first use, not here.

    Args:
      name: one of `task_names()`, for example 'shapes' or 'tfds:mnist'.
      network: name of the network, one of `networks_of(name)`.
      data_dir: folder in which TFDS prepared its sets.
      augment: whether training images are randomly cropped and mirrored; None: yes, except for 'shapes'.
      cache_bytes: largest size in bytes of a decoded split that is held in memory; a larger split is read from
        disk by record.
      image_size: side in pixels to which images of a TFDS set are resized; None: see `tfds_images.tfds_set`.
      clicks: examples of the task 'clicks'; None: `DrawnClicks()`.
      click_width: `ClicksTask.width`.
      text: examples of the task 'text'; None: `DrawnText()`.
      text_dropout: `TextTask.dropout`.
      batch_size, seed, eval_batch_size, num_input_threads: fields of every task.
      crop_padding, crop_fill, flip, label_smoothing: fields of `ImageTask`. Other tasks ignore these and the other
        options of images.

    Raises:
      NotPrepared: the set is not prepared in data_dir (`models.data.tfds_images`).
      UserError: the name is unknown, the network does not fit the task, or the set or the task refuses a value.
    """
    if name in _WITHOUT_IMAGES:
        _check_network(name, network)
        common = {
            "batch_size": batch_size,
            "eval_batch_size": eval_batch_size,
            "seed": seed,
            "num_input_threads": num_input_threads,
        }
        if name == CLICKS:
            return ClicksTask(clicks=clicks or DrawnClicks(), width=click_width, **common)
        return TextTask(text=text or DrawnText(), size=TRANSFORMERS[network], dropout=text_dropout, **common)
    images = _image_set(name, data_dir=data_dir, cache_bytes=cache_bytes, image_size=image_size)
    _check_network(name, network)
    return ImageTask(
        name=name,
        images=images,
        network=network,
        batch_size=batch_size,
        eval_batch_size=eval_batch_size,
        seed=seed,
        augment=is_augmented(name, augment),
        crop_padding=crop_padding,
        crop_fill=crop_fill,
        flip=flip,
        label_smoothing=label_smoothing,
        num_input_threads=num_input_threads,
    )


def _image_set(name: str, **where: object) -> ImageSet:
    if name.startswith(TFDS_PREFIX):
        return tfds_set(name.removeprefix(TFDS_PREFIX), **where)
    if name in _SETS:
        return _SETS[name](**where)
    near = difflib.get_close_matches(name, task_names(), n=1)
    meant = repr(near[0]) if near else f"{TFDS_PREFIX + name!r}, a set of TFDS"
    raise UserError(f"task={name!r}: must be one of {', '.join(task_names())}; did you mean {meant}?")


def _check_network(task: str, network: str) -> None:
    """Raises UserError for a network of another kind of task. `build_network` refuses an unknown name."""
    if task in _WITHOUT_IMAGES:
        names = networks_of(task)
        if network not in names:
            raise UserError(
                f"network={network!r}: task={task!r} has no images and trains only "
                f"{', '.join(map(repr, names))}; use {names[0]!r} or omit the network"
            )
        return
    for other, networks in _WITHOUT_IMAGES.items():
        if network in networks.names:
            raise UserError(
                f"network={network!r}: it takes {networks.inputs}, and task={task!r} has images; use "
                f"task={other!r}, or one of the networks {', '.join(network_names())}"
            )
