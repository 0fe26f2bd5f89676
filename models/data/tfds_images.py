"""Sets of labelled images that TFDS has prepared on this machine: `cifar10`, and others by name.

Nothing here uses the network. A split that fits in memory is decoded once; a larger one is read from its record
files by index. Both keep the order of the files, so the stream of batches is the same.
"""

import dataclasses
import functools
import math
import os
import re

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from models.data.image_store import ImageSet, ImageStore, Store, empty_images, taken_over
from models.data.record_index import RecordRange, index_records
from models.data.record_store import RecordStore
from towers.errors import UserError, without_operations

# The usual mean and standard deviation of CIFAR-10's training pixels by channel, in 0..255.
CIFAR10_MEAN = (125.3, 123.0, 113.9)
CIFAR10_STD = (63.0, 62.1, 66.7)

# Side in pixels to which images of different sizes are resized when no image_size is given.
DEFAULT_IMAGE_SIZE = 64

# Size of the batches in which a split is decoded: this many images, or fewer if they are large.
_DECODED_AT_ONCE = 256
_DECODED_BYTES_AT_ONCE = 8 << 20
# name or name/config, with or without :version. For names of other forms TFDS would use the network.
_NAME = re.compile(r"[A-Za-z]\w*(/[\w.+=-]+)?(:\d+\.\d+\.\d+)?")
# What TFDS says of a version or a configuration that a set does not have.
_NO_SUCH_VARIANT = re.compile(r"Dataset \S+ cannot be loaded at version .*\w|BuilderConfig \S+ not found")


class NotPrepared(UserError):
    """TFDS has not prepared a set in the given folder; the message says how to prepare it.

    Attributes:
      name: TFDS's name of the set.
      data_dir: the folder; None if none was given.
    """

    def __init__(self, message: str, *, name: str, data_dir: str | None):
        super().__init__(message)
        self.name, self.data_dir = name, data_dir


class NotReadableByRecord(UserError):
    """A split exceeds the memory limit, and its files are of a format that can't be read by record.

    Attributes:
      what: the set, its format, and the size of the split.
      decoded_bytes: size of the decoded split.
    """

    def __init__(self, what: str, *, decoded_bytes: int, cache_bytes: int):
        super().__init__(
            f"{what}, more than cache_bytes={cache_bytes}: only tfrecord files can be read by record; use "
            f"cache_bytes={decoded_bytes}, or prepare the set with file_format='tfrecord'"
        )
        self.what, self.decoded_bytes = what, decoded_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
    """The features of a set that are the image and its label, and the shape of the decoded image.

    Attributes:
      image, label: keys of the features.
      image_shape: (H, W, C) after resizing.
      is_resized: whether images are resized to image_shape.
      num_classes: number of classes of the label.
    """

    image: str
    label: str
    image_shape: tuple[int, int, int]
    is_resized: bool
    num_classes: int


def cifar10_set(*, data_dir: str | None, cache_bytes: int, image_size: int | None = None) -> ImageSet:
    """CIFAR-10, normalised by its usual constants; arguments and errors are those of `tfds_set`."""
    images = tfds_set("cifar10", data_dir=data_dir, cache_bytes=cache_bytes, image_size=image_size)
    return dataclasses.replace(images, known_mean=CIFAR10_MEAN, known_std=CIFAR10_STD)


def tfds_set(name: str, *, data_dir: str | None, cache_bytes: int, image_size: int | None = None) -> ImageSet:
    """A prepared TFDS set with one image and one class label in each example.

    'eval' is the set's test split. Without one it is the validation split, and without that the last tenth of
    train, which is then excluded from training. Resizing crops the largest centred square and scales it, so that
    nothing is distorted.

    Args:
      name: TFDS's name, for example 'mnist', 'food101:2.0.0' or 'name/config'.
      data_dir: the folder in which TFDS prepared the set.
      cache_bytes: largest size in bytes of a decoded split that is held in memory; a larger split is read from
        disk.
      image_size: side in pixels to which images are resized; None: images keep their size, or are resized to
        `DEFAULT_IMAGE_SIZE` if their sizes differ.

    Raises:
      NotPrepared: the set is not prepared in data_dir.
      NotReadableByRecord: a split exceeds cache_bytes, and its files can't be read by record.
      UserError: the name is invalid, the features are others, or there is no split to train on.
    """
    builder = prepared_builder(name, data_dir)
    fields = _fields(f"tfds:{name}", builder.info.features, image_size)
    splits = _splits(f"tfds:{name}", builder)
    for split in splits.values():
        _check_readable(builder, split, fields, cache_bytes)
    return ImageSet(
        name=name,
        image_shape=fields.image_shape,
        num_classes=fields.num_classes,
        num_examples={ours: builder.info.splits[theirs].num_examples for ours, theirs in splits.items()},
        open_store=lambda split: _open_store(builder, splits[split], fields, cache_bytes),
    )


def prepared_builder(name: str, data_dir: str | None) -> tfds.core.DatasetBuilder:
    """TFDS's builder of a set that is prepared in `data_dir`.

    Raises:
      NotPrepared: the set is not prepared there; the message says how to prepare it with and without a network.
      UserError: the name does not have the form of TFDS's names, or the set has no such version or configuration.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"tfds:{name}: not a TFDS name; use a name like mnist, name/config or name:1.0.0")
    if data_dir is None:
        raise _not_prepared(f"{name} needs data_dir, the folder in which TFDS prepared it", name, None)
    data_dir = os.path.expanduser(data_dir)
    try:
        builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
    except tfds.core.DatasetNotFoundError:
        what = f"tfds:{name}: no such set in TFDS, and none in data_dir={data_dir}"
        raise _not_prepared(what, name, data_dir) from None
    except (AssertionError, ValueError) as error:
        found = _NO_SUCH_VARIANT.search(str(error))
        if found is None:
            raise
        raise UserError(
            f"tfds:{name}: {found.group()}; give another version or configuration, or omit it"
        ) from error
    if not builder.is_prepared():
        raise _not_prepared(f"{name} is not prepared in data_dir={data_dir}", name, data_dir)
    return builder


def _not_prepared(what: str, name: str, data_dir: str | None) -> NotPrepared:
    shown, folder = data_dir or "D", re.split("[/:]", name)[0]
    return NotPrepared(
        f'{what}; with a network: python -c "import tensorflow_datasets as tfds; '
        f"tfds.builder('{name}', data_dir='{shown}').download_and_prepare()\"; "
        f"without: copy a prepared folder {folder}/ into {shown}",
        name=name,
        data_dir=data_dir,
    )


def _fields(name: str, features: tfds.features.FeatureConnector, image_size: int | None) -> _Fields:
    items = dict(features.items()) if isinstance(features, tfds.features.FeaturesDict) else {}
    images = [key for key, feature in items.items() if isinstance(feature, tfds.features.Image)]
    labels = [key for key, feature in items.items() if isinstance(feature, tfds.features.ClassLabel)]
    if len(images) != 1 or len(labels) != 1:
        found = ", ".join(f"{key}: {type(feature).__name__}" for key, feature in items.items())
        raise UserError(
            f"{name} has the features {found or type(features).__name__}: "
            "must have exactly one Image and one ClassLabel; "
            "choose another set, or pass it as arrays to models.OwnTask"
        )
    image, num_classes = items[images[0]], items[labels[0]].num_classes
    if image.np_dtype != np.uint8 or image.shape[-1] is None or not num_classes:
        raise UserError(
            f"{name}: images are {np.dtype(image.np_dtype)} {image.shape} with {num_classes} classes: "
            "must be uint8, with a known number of channels and of classes; "
            "pass the set as arrays to models.OwnTask"
        )
    if image_size is not None and image_size < 1:
        raise UserError(f"image_size={image_size}: must be at least 1 pixel; use 32 or more")
    is_resized = image_size is not None or None in image.shape
    side = image_size or DEFAULT_IMAGE_SIZE
    shape = (side, side, image.shape[-1]) if is_resized else tuple(image.shape)
    return _Fields(
        image=images[0],
        label=labels[0],
        image_shape=shape,
        is_resized=is_resized,
        num_classes=num_classes,
    )


def _splits(name: str, builder: tfds.core.DatasetBuilder) -> dict[str, str]:
    """TFDS's splits that serve as 'train' and 'eval'."""
    present = {split for split, info in builder.info.splits.items() if info.num_examples}
    if "train" not in present:
        found = ", ".join(sorted(present)) or "no split"
        raise UserError(f"{name} has {found}: must have a split 'train'; choose another set")
    for held_out in ("test", "validation"):
        if held_out in present:
            return {"train": "train", "eval": held_out}
    return {"train": "train[:90%]", "eval": "train[90%:]"}


def _open_store(builder: tfds.core.DatasetBuilder, split: str, fields: _Fields, cache_bytes: int) -> Store:
    if _decoded_bytes(builder, split, fields) > cache_bytes:
        return _record_store(builder, split, fields)
    return _image_store(builder, split, fields)


def _decoded_bytes(builder: tfds.core.DatasetBuilder, split: str, fields: _Fields) -> int:
    return builder.info.splits[split].num_examples * math.prod(fields.image_shape)


def _check_readable(builder: tfds.core.DatasetBuilder, split: str, fields: _Fields, cache_bytes: int) -> None:
    """Raises NotReadableByRecord if the split exceeds cache_bytes and `_record_store` can't read its files."""
    decoded_bytes, file_format = _decoded_bytes(builder, split, fields), builder.info.file_format
    if decoded_bytes > cache_bytes and file_format is not tfds.core.FileFormat.TFRECORD:
        what = (
            f"{builder.name} is stored as {file_format.value}, and its split {split} takes {decoded_bytes} bytes"
        )
        raise NotReadableByRecord(what, decoded_bytes=decoded_bytes, cache_bytes=cache_bytes)


def _image_store(builder: tfds.core.DatasetBuilder, split: str, fields: _Fields) -> ImageStore:
    """Decodes a split on all cores, directly into the memory of its store."""
    # Reads one file after the other, in the order of the record index.
    order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    examples = builder.as_dataset(
        split=split,
        read_config=order,
        decoders=tfds.decode.PartialDecoding({fields.image: True, fields.label: True}),
    )
    examples = examples.map(functools.partial(_image_and_label, fields), num_parallel_calls=tf.data.AUTOTUNE)
    images = empty_images((builder.info.splits[split].num_examples, *fields.image_shape))
    at_once = max(1, min(_DECODED_AT_ONCE, _DECODED_BYTES_AT_ONCE // math.prod(fields.image_shape)))
    labels = []
    try:
        for some_images, some_labels in examples.batch(at_once).prefetch(2):
            images[len(labels) : len(labels) + len(some_labels)] = some_images
            labels += some_labels.numpy().tolist()
    except tf.errors.OpError as error:
        raise _unreadable(builder, split, error) from error
    return ImageStore(
        images=taken_over(images[: len(labels)]),
        labels=np.array(labels, np.int64),
        num_classes=fields.num_classes,
        name=f"{builder.name} {split}",
    )


def _unreadable(builder: tfds.core.DatasetBuilder, split: str, error: tf.errors.OpError) -> UserError:
    """The UserError for a split that TFDS failed to read: it names the file if one is missing or incomplete."""
    if builder.info.file_format is tfds.core.FileFormat.TFRECORD:
        try:
            index_records(_record_ranges(builder, split))
        except UserError as of_file:
            return of_file
    reason = without_operations(str(error)).strip().partition("\n")[0]
    return UserError(
        f"{builder.data_dir}: its split {split} can't be read ({reason}): a file is damaged; copy or prepare "
        "the set again"
    )


def _record_ranges(builder: tfds.core.DatasetBuilder, split: str) -> list[RecordRange]:
    return [
        RecordRange(path=os.fspath(part.filename), skip=part.skip, take=part.take)
        for part in builder.info.splits[split].file_instructions
    ]


def _record_store(builder: tfds.core.DatasetBuilder, split: str, fields: _Fields) -> RecordStore:
    """Indexes the record files of a split."""
    wanted = tfds.decode.PartialDecoding({fields.image: True, fields.label: True})
    features = wanted.extract_features(builder.info.features)

    def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return _image_and_label(fields, features.deserialize_example(record))

    return RecordStore(
        index=index_records(_record_ranges(builder, split)),
        decode=decode,
        image_shape=fields.image_shape,
        num_classes=fields.num_classes,
        name=f"{builder.name} {split}",
    )


def _image_and_label(fields: _Fields, example: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """(image uint8 [H, W, C], label int64) of a decoded example."""
    image = example[fields.image]
    if fields.is_resized:
        image = _resized(image, fields.image_shape[0])
    return tf.ensure_shape(image, fields.image_shape), tf.cast(example[fields.label], tf.int64)


def _resized(image: tf.Tensor, side: int) -> tf.Tensor:
    """The largest centred square of an image uint8 [H, W, C], scaled to uint8 [side, side, C]."""
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    square = tf.minimum(height, width)
    top, left = (height - square) // 2, (width - square) // 2
    image = image[top : top + square, left : left + square]
    # Without antialias, most pixels of a large picture would be ignored.
    image = tf.image.resize(image, [side, side], antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)
