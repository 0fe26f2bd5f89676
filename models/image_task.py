"""Image classification: trains a network by name on a set of labelled images."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

from models.data.augment import (
    FILLS,
    FLIPS,
    PADDING,
    CropFlip,
    alternately_mirrored,
    crop_flip,
    draw_crop_flip,
    normalise,
)
from models.data.augment_on_device import RawImages, crop_flip_on_device
from models.data.batch_stream import BatchSlice, batches_per_epoch, derived_seed, eval_stream, train_stream
from models.data.image_store import ImageSet
from models.data.splits import checked_split
from models.field_checks import check_at_least_1
from models.networks.registry import build_network, weights_from_data
from models.weighted_sum import weighted_sum
from towers.errors import UserError
from towers.input.unprepared import Unprepared
from towers.task import Batch, InputShard, WeightedLoss, WeightedValue

# Maximum number of training images from which a network may compute its initial weights.
_NUM_SAMPLE_IMAGES = 5000


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ImageTask:
    """A `towers.task.Task`: classifies images. Also a `PreparesOnDevice` of `towers.input`, by raw uint8 images.

    Weight decay is an option of the update, not of the task.

    Attributes:
      name: name of the task, for reports.
      images: the labelled images.
      network: name of the network, one of `models.networks.registry.network_names()`.
      batch_size: examples in a global training batch.
      eval_batch_size: examples in a global evaluation batch; None: batch_size.
      seed: seed of the order of the examples and of their augmentation.
      augment: whether training images are randomly cropped and mirrored.
      crop_padding: pixels of padding on each side of a training image before it is cropped.
      crop_fill: contents of the padding: 'black' or 'reflect'.
      flip: when training images are mirrored: 'random', or 'alternating' from epoch to epoch.
      label_smoothing: share of the probability that is spread evenly over the classes, at least 0 and below 1.
      num_input_threads: threads that prepare batches.

    Raises:
      UserError: a number is out of range, or crop_fill or flip is unknown.
    """

    name: str
    images: ImageSet
    network: str
    batch_size: int
    eval_batch_size: int | None = None
    seed: int = 0
    augment: bool = True
    crop_padding: int = PADDING
    crop_fill: str = "black"
    flip: str = "random"
    label_smoothing: float = 0.0
    num_input_threads: int = 2

    # Its examples are checked where they are read, and its network fits them.
    data_is_checked = True

    def __post_init__(self):
        if self.eval_batch_size is None:
            object.__setattr__(self, "eval_batch_size", self.batch_size)
        check_at_least_1(self, "batch_size", "eval_batch_size", "num_input_threads")
        if self.crop_padding < 0:
            raise UserError(f"crop_padding={self.crop_padding}: must be 0 pixels or more; 4 is usual")
        for field, known in (("crop_fill", FILLS), ("flip", FLIPS)):
            if getattr(self, field) not in known:
                raise UserError(f"{field}={getattr(self, field)!r} is unknown: use one of {', '.join(known)}")
        self._check_reflection()
        if not 0 <= self.label_smoothing < 1:
            raise UserError(
                f"label_smoothing={self.label_smoothing}: must be a share of the probability, "
                "from 0 to below 1; use 0.1 or omit it"
            )

    def _check_reflection(self) -> None:
        side = min(self.images.image_shape[:2])
        if self.augment and self.crop_fill == "reflect" and self.crop_padding >= side:
            raise UserError(
                f"crop_padding={self.crop_padding} with crop_fill='reflect': images of {side} pixels fill at "
                f"most {side - 1} by reflection; use crop_padding={min(PADDING, side - 1)}, or crop_fill='black'"
            )

    def num_examples(self, split: str) -> int:
        """Number of examples in 'train' or 'eval'."""
        return self.images.num_examples[checked_split(split)]

    def build_model(self) -> keras.Model:
        """A new model: normalised float32 [N, H, W, C] to logits [N, classes]."""
        return build_network(
            self.network,
            image_shape=self.images.image_shape,
            num_classes=self.images.num_classes,
            data_weights=self._data_weights,
        )

    @functools.cached_property
    def _data_weights(self) -> Mapping[str, np.ndarray]:
        """Initial weights from training images, by variable path; computed once for all models of this task."""
        return weights_from_data(self.network, self._sample_images)

    def _sample_images(self) -> np.ndarray:
        """The first training images, normalised, float32 [N, H, W, C]."""
        count = min(_NUM_SAMPLE_IMAGES, self.images.num_examples["train"])
        with tf.device("CPU:0"):
            images, _ = self.images.train.gather(tf.range(count, dtype=tf.int64))
            return normalise(images, *self.images.statistics).numpy()

    def dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """Batches with features float32 [n, H, W, C] and labels int64 [n]; see `towers.task.Task.dataset`."""
        return self._stream(split, shard, self._train_batch, self._eval_batch)

    def unprepared_dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """The same batches with features `Unprepared(RawImages)`."""
        return self._stream(split, shard, self._raw_train_batch, self._raw_eval_batch)

    def prepared(self, raw: RawImages) -> tf.Tensor:
        """Features float32 [n, H, W, C] from raw images, bitwise equal to those of `dataset` on any device."""
        images = raw.images
        if raw.draws:
            images = crop_flip_on_device(images, raw.draws, self.crop_padding, self.crop_fill)
        return normalise(images, *self.images.statistics)

    def _stream(
        self,
        split: str,
        shard: InputShard,
        train_batch: Callable[[BatchSlice], Batch],
        eval_batch: Callable[[BatchSlice], Batch],
    ) -> tf.data.Dataset:
        if checked_split(split) == "train":
            return train_stream(
                train_batch,
                num_examples=self.images.train.num_examples,
                batch_size=self.batch_size,
                seed=self.seed,
                shard=shard,
                num_threads=self.num_input_threads,
            )
        return eval_stream(
            eval_batch,
            num_examples=self.images.evaluation.num_examples,
            batch_size=self.eval_batch_size,
            shard=shard,
            num_threads=self.num_input_threads,
        )

    def loss(self, outputs: tf.Tensor, batch: Batch) -> WeightedLoss:
        """SUM of the examples' softmax cross-entropy, in at least float32, and SUM of their weights."""
        logits = outputs if outputs.dtype == tf.float64 else tf.cast(outputs, tf.float32)
        values = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch.labels, logits=logits)
        if self.label_smoothing:
            evenly = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
            values = (1 - self.label_smoothing) * values + self.label_smoothing * evenly
        return WeightedLoss(*weighted_sum(tf.cast(values, tf.float32), batch.weights))

    def metrics(self, outputs: tf.Tensor, batch: Batch) -> Mapping[str, WeightedValue]:
        """{'accuracy': (weight of the examples whose largest logit is the label's, weight of all examples)}."""
        right = tf.equal(tf.argmax(outputs, axis=-1), tf.cast(batch.labels, tf.int64))
        return {"accuracy": WeightedValue(*weighted_sum(tf.cast(right, tf.float32), batch.weights))}

    def _train_batch(self, part: BatchSlice) -> Batch:
        images, labels = self.images.train.gather(part.indices)
        if self.augment:
            images = crop_flip(images, self._draws(part), self.crop_padding, self.crop_fill)
        return Batch(normalise(images, *self.images.statistics), labels)

    def _raw_train_batch(self, part: BatchSlice) -> Batch:
        images, labels = self.images.train.gather(part.indices)
        return Batch(Unprepared(RawImages.of(images, self._draws(part) if self.augment else ())), labels)

    def _draws(self, part: BatchSlice) -> CropFlip:
        # Draws for the whole global batch and takes a slice, so that the draws don't depend on how it is divided.
        seed = tf.stack([tf.constant(derived_seed(self.seed, "augment"), tf.int64), part.batch_index])
        draws = draw_crop_flip(self.batch_size, seed, self.crop_padding)
        own_draws = CropFlip(*(draw[part.begin : part.end] for draw in draws))
        return own_draws._replace(mirrored=self._mirrored(part)) if self.flip == "alternating" else own_draws

    def _mirrored(self, part: BatchSlice) -> tf.Tensor:
        num_examples = self.images.train.num_examples
        epoch = part.batch_index // batches_per_epoch(num_examples, self.batch_size)
        return alternately_mirrored(part.indices, epoch, derived_seed(self.seed, "flip"), num_examples)

    def _eval_batch(self, part: BatchSlice) -> Batch:
        images, labels = self.images.evaluation.gather(part.indices)
        return Batch(normalise(images, *self.images.statistics), labels)

    def _raw_eval_batch(self, part: BatchSlice) -> Batch:
        images, labels = self.images.evaluation.gather(part.indices)
        return Batch(Unprepared(RawImages.of(images)), labels)
