"""Sets of labelled images that TFDS has prepared on this machine: `cifar10` and any other by name.

Nothing here downloads or asks the network. A split that fits in memory is decoded once; a larger one is
read from its record files by number. Both keep the order of the files, so the stream is the same.
"""

import dataclasses
import functools
import os
import re

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from models.data.image_store import ImageSet, ImageStore, Store
from models.data.record_index import RecordRange, index_records
from models.data.record_store import RecordStore
from towers.errors import UserError

# Mean and standard deviation of the training pixels by channel, in 0..255, as usually given for CIFAR-10.
CIFAR10_MEAN = (125.3, 123.0, 113.9)
CIFAR10_STD = (63.0, 62.1, 66.7)

# Side in pixels of images that have no size in common and for which none was asked.
DEFAULT_IMAGE_SIZE = 64

_DECODED_AT_ONCE = 256
# name, name/config, with or without :version. Other names would make TFDS look at the network.
_NAME = re.compile(r"[A-Za-z]\w*(/[\w.+=-]+)?(:\d+\.\d+\.\d+)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
    """Which features of a set are the image and its label, and how the image comes out.

    Attributes:
      image, label: keys of the features.
      image_shape: (H, W, C) after resizing.
      is_resized: whether images are resized to it.
      num_classes: classes of the label.
    """

    image: str
    label: str
    image_shape: tuple[int, int, int]
    is_resized: bool
    num_classes: int


def cifar10_set(*, data_dir: str | None, cache_bytes: int, image_size: int | None = None) -> ImageSet:
    """CIFAR-10, normalised by its usual constants; arguments and errors as `tfds_set`."""
    images = tfds_set("cifar10", data_dir=data_dir, cache_bytes=cache_bytes, image_size=image_size)
    return dataclasses.replace(images, known_mean=CIFAR10_MEAN, known_std=CIFAR10_STD)


def tfds_set(name: str, *, data_dir: str | None, cache_bytes: int, image_size: int | None = None) -> ImageSet:
    """A prepared TFDS set with one image and one class label an example.

    'eval' is the set's test split, else its validation split, else the last tenth of train, which is then
    not trained on. Resizing cuts the largest centred square out and scales it, so that nothing is distorted.

    Args:
      name: TFDS's name, as 'mnist', 'food101:2.0.0' or 'name/config'.
      data_dir: the folder that TFDS prepared the set in.
      cache_bytes: a split that takes more when decoded is read from disk.
      image_size: side in pixels to resize to; None leaves images as they are, or, where their sizes
        differ, makes them `DEFAULT_IMAGE_SIZE`.

    Raises:
      UserError: not prepared in data_dir, other features, or no split to train on.
    """
    builder = prepared_builder(name, data_dir)
    fields = _fields(f"tfds:{name}", builder.info.features, image_size)
    splits = _splits(f"tfds:{name}", builder)
    return ImageSet(
        name=name,
        image_shape=fields.image_shape,
        num_classes=fields.num_classes,
        num_examples={ours: builder.info.splits[theirs].num_examples for ours, theirs in splits.items()},
        open_store=lambda split: _open_store(builder, splits[split], fields, cache_bytes),
    )


def prepared_builder(name: str, data_dir: str | None) -> tfds.core.DatasetBuilder:
    """TFDS's builder of a set that lies ready in `data_dir`.

    Raises:
      UserError: it does not; says how to get it with and without a network.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"tfds:{name}: give a TFDS name as mnist, name/config or name:1.0.0")
    if data_dir is None:
        raise UserError(f"{name} needs --data_dir, the folder that TFDS prepared it in; {_ways_out(name, 'D')}")
    data_dir = os.path.expanduser(data_dir)
    try:
        builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
    except tfds.core.DatasetNotFoundError:
        raise UserError(
            f"tfds:{name}: no such set in TFDS and none in data_dir={data_dir}; {_ways_out(name, data_dir)}"
        ) from None
    if not builder.is_prepared():
        raise UserError(f"{name} is not prepared in data_dir={data_dir}; {_ways_out(name, data_dir)}")
    return builder


def _ways_out(name: str, data_dir: str) -> str:
    with_network = (
        'with a network: python -c "import tensorflow_datasets as tfds; '
        f"tfds.builder('{name}', data_dir='{data_dir}').download_and_prepare()\""
    )
    if name.split(":")[0] == "cifar10":
        return (
            f"{with_network}; without: python -m launch.import_cifar "
            f"--archive cifar-10-binary.tar.gz --data_dir {data_dir}"
        )
    folder = re.split("[/:]", name)[0]
    return f"{with_network}; without: copy a prepared folder {folder}/ into {data_dir}"


def _fields(name: str, features: tfds.features.FeatureConnector, image_size: int | None) -> _Fields:
    items = dict(features.items()) if isinstance(features, tfds.features.FeaturesDict) else {}
    images = [key for key, feature in items.items() if isinstance(feature, tfds.features.Image)]
    labels = [key for key, feature in items.items() if isinstance(feature, tfds.features.ClassLabel)]
    if len(images) != 1 or len(labels) != 1:
        found = ", ".join(f"{key}: {type(feature).__name__}" for key, feature in items.items())
        raise UserError(
            f"{name} has the features {found or type(features).__name__}: "
            "a set of labelled images has exactly one Image and one ClassLabel; "
            "choose another set, or bring it as arrays with models.own_task"
        )
    image, num_classes = items[images[0]], items[labels[0]].num_classes
    if image.np_dtype != np.uint8 or image.shape[-1] is None or not num_classes:
        raise UserError(
            f"{name}: images are {np.dtype(image.np_dtype)} {image.shape} with {num_classes} classes: "
            "uint8 images with a known number of channels and of classes are needed; "
            "bring it as arrays with models.own_task"
        )
    if image_size is not None and image_size < 1:
        raise UserError(f"image_size={image_size}: a side is at least 1 pixel; use 32 or more")
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
    """TFDS's splits for 'train' and 'eval'."""
    present = {split for split, info in builder.info.splits.items() if info.num_examples}
    if "train" not in present:
        found = ", ".join(sorted(present)) or "no split"
        raise UserError(f"{name} has {found}: a split 'train' is needed; choose another set")
    for held_out in ("test", "validation"):
        if held_out in present:
            return {"train": "train", "eval": held_out}
    return {"train": "train[:90%]", "eval": "train[90%:]"}


def _open_store(builder: tfds.core.DatasetBuilder, split: str, fields: _Fields, cache_bytes: int) -> Store:
    height, width, channels = fields.image_shape
    decoded_bytes = builder.info.splits[split].num_examples * height * width * channels
    if decoded_bytes > cache_bytes:
        return _record_store(builder, split, fields)
    return _image_store(builder, split, fields)


def _image_store(builder: tfds.core.DatasetBuilder, split: str, fields: _Fields) -> ImageStore:
    """Decodes a split, on all cores."""
    # One file after the other, as the record index has them.
    order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    examples = builder.as_dataset(
        split=split,
        read_config=order,
        decoders=tfds.decode.PartialDecoding({fields.image: True, fields.label: True}),
    )
    examples = examples.map(functools.partial(_image_and_label, fields), num_parallel_calls=tf.data.AUTOTUNE)
    batches = list(examples.batch(_DECODED_AT_ONCE).prefetch(2))
    return ImageStore(
        images=tf.concat([images for images, _ in batches], axis=0),
        labels=tf.concat([labels for _, labels in batches], axis=0),
        num_classes=fields.num_classes,
        name=f"{builder.name} {split}",
    )


def _record_store(builder: tfds.core.DatasetBuilder, split: str, fields: _Fields) -> RecordStore:
    """Indexes a split's files."""
    if builder.info.file_format is not tfds.core.FileFormat.TFRECORD:
        raise UserError(
            f"{builder.name} is kept as {builder.info.file_format.value} and does not fit in the cache: "
            "only tfrecord files are read by record; "
            "prepare it with file_format='tfrecord' or raise --cache_bytes"
        )
    ranges = [
        RecordRange(path=os.fspath(part.filename), skip=part.skip, take=part.take)
        for part in builder.info.splits[split].file_instructions
    ]
    wanted = tfds.decode.PartialDecoding({fields.image: True, fields.label: True})
    features = wanted.extract_features(builder.info.features)

    def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return _image_and_label(fields, features.deserialize_example(record))

    return RecordStore(
        index=index_records(ranges),
        decode=decode,
        image_shape=fields.image_shape,
        num_classes=fields.num_classes,
        name=f"{builder.name} {split}",
    )


def _image_and_label(fields: _Fields, example: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """(uint8 [H, W, C], int64) of a decoded example."""
    image = example[fields.image]
    if fields.is_resized:
        image = _resized(image, fields.image_shape[0])
    return tf.ensure_shape(image, fields.image_shape), tf.cast(example[fields.label], tf.int64)


def _resized(image: tf.Tensor, side: int) -> tf.Tensor:
    """The largest centred square of uint8 [H, W, C], scaled to uint8 [side, side, C]."""
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    square = tf.minimum(height, width)
    top, left = (height - square) // 2, (width - square) // 2
    image = image[top : top + square, left : left + square]
    # antialias: without it most pixels of a large picture would be skipped.
    image = tf.image.resize(image, [side, side], antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)
