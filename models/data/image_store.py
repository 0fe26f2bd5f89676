"""Labelled images by index: `ImageStore` in memory, and `ImageSet`, a train store and an eval store."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from towers.errors import UserError

# Maximum number of examples that are read to estimate the mean and the standard deviation of a set.
STATISTICS_EXAMPLES = 10_000
# TensorFlow uses the memory of an array without a copy if its address is a multiple of this.
_ALIGNMENT = 64


class Store(Protocol):
    """Labelled images that are read by index. `ImageStore` holds them in memory, `RecordStore` on disk."""

    @property
    def num_examples(self) -> int:
        """Number of images."""

    def gather(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Images uint8 [n, H, W, C] and labels int64 [n] at `indices` int64 [n]; works in a tf.data graph."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ImageStore:
    """Decoded images in memory, on the host.

    Attributes:
      images: uint8 [N, H, W, C], an array, which is copied, or a tensor in the host's memory; stored as a tensor.
      labels: whole numbers [N]; stored as an int64 tensor.
      num_classes: labels are 0 .. num_classes - 1.
      name: name of the set in messages.

    Raises:
      UserError: there are no images, a type or shape is wrong, or a label is out of range.
    """

    images: Any
    labels: Any
    num_classes: int
    name: str = "image store"

    def __post_init__(self):
        images, labels = np.asarray(self.images), np.asarray(self.labels)
        _check_images(self.name, images, labels)
        check_labels(self.name, labels, self.num_classes)
        # Eager tensors in the host's memory, also on a machine with a GPU and when called while a graph is traced.
        with tf.init_scope(), tf.device("CPU:0"):
            if not isinstance(self.images, tf.Tensor):
                object.__setattr__(self, "images", tf.constant(images))
            object.__setattr__(self, "labels", tf.constant(labels, tf.int64))

    @property
    def num_examples(self) -> int:
        return self.images.shape[0]

    def gather(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Store.gather`."""
        return tf.gather(self.images, indices), tf.gather(self.labels, indices)


def empty_images(shape: tuple[int, ...]) -> np.ndarray:
    """An uninitialised uint8 array of this shape, whose memory `taken_over` can use."""
    size = math.prod(shape)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].reshape(shape)


def taken_over(images: np.ndarray) -> tf.Tensor:
    """A tensor in the memory of an array from `empty_images`. Don't change the array afterwards.

    tf.constant would copy, and need three times the images' memory for a while.
    """
    return tf.experimental.dlpack.from_dlpack(images.__dlpack__())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ImageSet:
    """A train store and an eval store, each opened at its first use.

    So a process that only needs the shapes, or a server that reads no data, decodes nothing. A store that is
    opened while a graph is traced (in a cluster's dataset function) is opened outside that graph.

    Attributes:
      name: name of the set in messages.
      image_shape: (H, W, C) in pixels.
      num_classes: number of classes.
      num_examples: number of examples by split, 'train' and 'eval'.
      open_store: function from the name of a split to its store.
      known_mean, known_std: pixel statistics of the training split by channel, in 0..255; None: computed.
    """

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int
    num_examples: Mapping[str, int]
    open_store: Callable[[str], Store]
    known_mean: tuple[float, ...] | None = None
    known_std: tuple[float, ...] | None = None

    @functools.cached_property
    def train(self) -> Store:
        """The training examples."""
        with tf.init_scope(), tf.device("CPU:0"):
            return self.open_store("train")

    @functools.cached_property
    def evaluation(self) -> Store:
        """The held-out examples."""
        with tf.init_scope(), tf.device("CPU:0"):
            return self.open_store("eval")

    @functools.cached_property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, standard deviation) of the training pixels by channel, in 0..255."""
        if self.known_mean is not None and self.known_std is not None:
            return self.known_mean, self.known_std
        with tf.init_scope(), tf.device("CPU:0"):
            return channel_statistics(self.train)


def channel_statistics(store: Store) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation by channel, in 0..255, of up to `STATISTICS_EXAMPLES` evenly spaced images.

    Sums are over whole numbers, so every machine gets the same floats. A constant channel gets deviation 1, so
    that normalisation makes it 0.
    """
    num_read = min(store.num_examples, STATISTICS_EXAMPLES)
    indices = np.arange(num_read, dtype=np.int64) * store.num_examples // num_read
    count, total, squares = 0, 0, 0
    for start in range(0, num_read, 1000):
        images, _ = store.gather(tf.constant(indices[start : start + 1000]))
        pixels = images.numpy().reshape(-1, images.shape[-1])
        count += len(pixels)
        total = total + pixels.sum(0, dtype=np.int64)
        squares = squares + np.square(pixels, dtype=np.int64).sum(0)
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    deviation[deviation == 0] = 1.0
    return tuple(mean.tolist()), tuple(deviation.tolist())


def check_labels(name: str, labels: np.ndarray, num_classes: int) -> None:
    """Checks that all labels are 0 .. num_classes - 1.

    Raises:
      UserError: a label is not one of 0 .. num_classes - 1.
    """
    outside = (labels < 0) | (labels >= num_classes)
    if outside.any():
        first = int(np.argmax(outside))
        raise UserError(
            f"{name}: label {labels[first]} (example {first}; {int(outside.sum())} such labels): "
            f"with num_classes={num_classes}, labels are 0 to {num_classes - 1}; correct the labels or num_classes"
        )


def _check_images(name: str, images: np.ndarray, labels: np.ndarray) -> None:
    if images.ndim != 4 or images.dtype != np.uint8:
        raise UserError(
            f"{name}: images are {images.dtype} {list(images.shape)}: "
            "must be uint8 [N, height, width, channels]; scale them to 0..255 and convert with .astype('uint8')"
        )
    if len(images) == 0:
        raise UserError(f"{name}: 0 images: must be at least 1; pass arrays that are not empty")
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{name}: labels are {labels.dtype} {list(labels.shape)} for {len(images)} images: "
            "must be one whole number for each image"
        )
