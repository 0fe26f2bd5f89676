"""The tasks of the rows: a network on 8x8x3 images and two tags, with and without batch norm; a transformer.

The network has a frozen layer, which no mode may change, and whose inputs have gradients.

An epoch's last batch is short. The tags name rows of two embedding tables, so every mode sums sparse gradients.
The transformer's loss is per token of texts of several lengths, and its table of tokens is read in two ways.

They compute in float64, so that a difference of 1e-5 is a fault and never the rounding of one CPU's kernels. One
task computes in float32, with activations that have a continuous derivative, so that rounding errors stay small.
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from models.data.drawn_text import DrawnText
from models.networks.transformer import TransformerSize
from models.text_task import TextTask
from tests.towers.branches.branched_networks import conv_norm_relu, inception_block
from tests.towers.tiny_tasks import without_autotune
from towers.task import Batch, InputShard, WeightedLoss, WeightedValue

NUM_CLASSES = 10
NUM_TAGS, NUM_KINDS = 23, 5


class _InBatches:
    """The data of a task whose `_examples(split)` are a batch of all examples, the same in every process."""

    batch_size = 30

    def dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        batches = without_autotune(self._parts(split, shard))
        return batches.repeat().skip(shard.first_batch).shard(shard.stride, 0) if split == "train" else batches

    def _parts(self, split: str, shard: InputShard) -> tf.data.Dataset:
        """The shard's part of each batch; cut beforehand, because a function in a data set is traced each time."""
        examples = self._examples(split)

        def parts(begin: int, end: int, size: int) -> tf.data.Dataset:
            first, last = shard.bounds(size)

            def cut(leaf):
                return leaf[begin:end].reshape(-1, size, *leaf.shape[1:])[:, first:last]

            return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(cut, examples))

        count = self.num_examples(split)
        whole = count - count % self.batch_size
        return parts(0, whole, self.batch_size).concatenate(parts(whole, count, count - whole))

    def _totals(self, batch: Batch, weight: tf.Tensor) -> dict[str, WeightedValue]:
        """Two metrics whose weights sum to 1 over a split, so that their means are totals."""
        number = batch.labels["number"]
        once = tf.reduce_sum(tf.cast(tf.equal(number, 0), tf.float32))
        return {
            "total_examples": WeightedValue(tf.cast(tf.size(number), tf.float32), once),
            "total_weight": WeightedValue(weight, once),
        }


@dataclasses.dataclass(frozen=True)
class SmallImages(_InBatches):
    """Implements `towers.task.Task` with random images and tags, the same in every process.

    Attributes:
      name: name of the task, in the names of tests.
      num_images: number of images in an epoch. A batch has 30 images, the last batch the rest.
      batch_norm: whether the network has batch norms.
      nan_image: index of a training image that is not finite; None for none.
      precision: number format of the layers.
      activation: activation of the hidden layers.
    """

    name: str
    num_images: int
    batch_norm: bool
    nan_image: int | None = None
    precision: str = "float64"
    activation: str = "relu"
    # The check computes the first batches without a graph. The transformer's are checked.
    data_is_checked = True

    def num_examples(self, split: str) -> int:
        return self.num_images

    def build_model(self) -> keras.Model:
        """Every layer has a name, so that the variables' names are the same in every mode."""
        image, tags = layers.Input((8, 8, 3), name="image"), layers.Input((2,), dtype="int32", name="tags")
        outputs = self._block(image, "1", filters=8, strides=1)
        outputs = self._block(outputs, "2", filters=12, strides=2)
        flat = [layers.Flatten(name="flatten")(outputs)]
        # The ids of the second table are computed from the batch, and both tables have one width.
        for name, rows, ids in (("tags", NUM_TAGS, tags), ("kinds", NUM_KINDS, tags % NUM_KINDS)):
            found = layers.Embedding(rows, 3, name=f"table_of_{name}")(ids)
            flat.append(layers.Flatten(name=f"flatten_{name}")(found))
        flat[-1] = layers.Dense(8, "tanh", use_bias=False, trainable=False, name="frozen")(flat[-1])
        outputs = layers.Dense(NUM_CLASSES, name="logits")(layers.Concatenate(name="all")(flat))
        return keras.Model({"image": image, "tags": tags}, outputs)

    def _block(self, inputs, name, *, filters, strides):
        # No bias before a batch norm: it has no gradient, so the test would only compare its rounding errors.
        convolution = layers.Conv2D(
            filters, 3, strides=strides, use_bias=not self.batch_norm, name=f"convolution{name}"
        )
        outputs = convolution(inputs)
        if self.batch_norm:
            outputs = layers.BatchNormalization(momentum=0.9, name=f"norm{name}")(outputs)
        return layers.Activation(self.activation, name=f"activation{name}")(outputs)

    def _examples(self, split: str) -> Batch:
        """All examples as a batch. Weights are multiples of 1/2, so that their sums are exact in any order.

        Evaluation has labels of another dtype than training, as a user's data may have.
        """
        draw = np.random.default_rng({"train": 1, "eval": 2}[split])
        images = draw.normal(size=(self.num_images, 8, 8, 3)).astype(np.float32)
        if self.nan_image is not None and split == "train":
            images[self.nan_image] = np.nan
        return Batch(
            features={
                "image": images,
                "tags": draw.integers(0, NUM_TAGS, (self.num_images, 2)).astype(np.int32),
            },
            labels={
                "number": np.arange(self.num_images, dtype=np.int32),
                "class": draw.integers(0, NUM_CLASSES, self.num_images).astype(
                    {"train": np.int32, "eval": np.int64}[split]
                ),
            },
            weights=draw.choice([0.5, 1.0, 2.0], self.num_images).astype(np.float32),
        )

    def losses_and_weights(self, outputs, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        """The loss of each example, and its weight."""
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels["class"], outputs)
        return losses, tf.cast(batch.weights, losses.dtype)

    def loss(self, outputs, batch: Batch) -> WeightedLoss:
        losses, weights = self.losses_and_weights(outputs, batch)
        return WeightedLoss(tf.reduce_sum(losses * weights), tf.reduce_sum(batch.weights))

    def metrics(self, outputs, batch: Batch) -> dict[str, WeightedValue]:
        right = tf.cast(tf.equal(tf.argmax(outputs, -1), tf.cast(batch.labels["class"], tf.int64)), tf.float32)
        accuracy = WeightedValue(tf.reduce_sum(right), tf.cast(tf.size(right), tf.float32))
        return {"accuracy": accuracy, **self._totals(batch, tf.reduce_sum(batch.weights))}

    def total_weight(self, split: str) -> float:
        return float(np.sum(self._examples(split).weights))


@dataclasses.dataclass(frozen=True)
class SmallText(_InBatches):
    """Implements `towers.task.Task` with the transformer, loss and accuracy of `TextTask`, on weighted texts.

    Attributes:
      name: name of the task, in the names of tests.
      num_texts: number of texts in an epoch. A batch has 30 texts, the last batch the rest.
    """

    name: str
    num_texts: int
    precision = "float64"
    batch_norm = False

    @property
    def _task(self) -> TextTask:
        text = DrawnText(num_tokens=10, length=6, num_train=self.num_texts, num_eval=self.num_texts)
        return TextTask(text=text, size=TransformerSize(blocks=1, width=8, heads=2), batch_size=self.batch_size)

    def num_examples(self, split: str) -> int:
        return self.num_texts

    def build_model(self) -> keras.Model:
        return self._task.build_model()

    def _examples(self, split: str) -> Batch:
        with tf.init_scope():
            tokens, labels = self._task.text.gather(split, tf.range(self.num_texts, dtype=tf.int64))
        weights = np.random.default_rng(3).choice([0.5, 1.0, 2.0], self.num_texts).astype(np.float32)
        return Batch(
            features=tokens.numpy(),
            labels={"number": np.arange(self.num_texts, dtype=np.int32), "next": labels.numpy()},
            weights=weights,
        )

    def losses_and_weights(self, outputs, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        """The loss of each token, and its weight: that of its text, 0 for padding."""
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels["next"], outputs)
        valid = tf.cast(batch.labels["next"] > 0, losses.dtype)
        return losses, valid * tf.cast(batch.weights, losses.dtype)[:, None]

    def loss(self, outputs, batch: Batch) -> WeightedLoss:
        return self._task.loss(outputs, batch._replace(labels=batch.labels["next"]))

    def metrics(self, outputs, batch: Batch) -> dict[str, WeightedValue]:
        found = self._task.metrics(outputs, batch._replace(labels=batch.labels["next"]))
        return {**found, **self._totals(batch, self.loss(outputs, batch).weight)}

    def total_weight(self, split: str) -> float:
        found = self._examples(split)
        return float(np.sum((found.labels["next"] > 0) * found.weights[:, None]))


@dataclasses.dataclass(frozen=True)
class SmallInception(SmallImages):
    """The same task with a network of two blocks, whose branches have batch norms: three branches, then two."""

    def build_model(self) -> keras.Model:
        image, tags = layers.Input((8, 8, 3), name="image"), layers.Input((2,), dtype="int32", name="tags")
        outputs = conv_norm_relu(image, 4, 3, "stem")
        outputs = inception_block(outputs, "a", dropout=0.0)
        wide, narrow = (conv_norm_relu(outputs, size, size, f"b_{size}") for size in (3, 1))
        outputs = layers.Concatenate(name="b_join")([wide, narrow])
        outputs = layers.GlobalAveragePooling2D(name="mean")(outputs)
        tagged = layers.Flatten(name="flatten_tags")(layers.Embedding(NUM_TAGS, 3, name="table_of_tags")(tags))
        outputs = layers.Dense(NUM_CLASSES, name="logits")(layers.Concatenate(name="all")([outputs, tagged]))
        return keras.Model({"image": image, "tags": tags}, outputs)


# An epoch of 70 images ends with a batch of 10. An epoch of 61 ends with a batch of 1: most towers are idle in it.
BATCH_NORM_LAST_1 = SmallImages("batch_norm_last_1", num_images=61, batch_norm=True)
TASKS = (
    SmallImages("plain_last_10", num_images=70, batch_norm=False),
    SmallImages("plain_last_1", num_images=61, batch_norm=False),
    SmallImages("batch_norm_last_10", num_images=70, batch_norm=True),
    BATCH_NORM_LAST_1,
    SmallImages("float32_last_10", num_images=70, batch_norm=False, precision="float32", activation="tanh"),
    SmallText("transformer_last_1", num_texts=61),
)
# A task of the table.
SmallTask = SmallImages | SmallText
# For the rows that divide branches.
INCEPTION = SmallInception("inception_last_1", num_images=61, batch_norm=True)
# Its second batch is not finite, because of an image in the last tower's part.
NAN_IN_BATCH_1 = SmallImages("nan_in_batch_1", num_images=61, batch_norm=True, nan_image=59)
