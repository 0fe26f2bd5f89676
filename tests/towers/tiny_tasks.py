"""Tasks of a few examples and layers, for tests that look at one thing."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from strategies.synchronous import SynchronousStrategy
from strategies.towers import towers_strategy
from tests.towers.logical_cpus import cpus
from towers.options import StepOptions
from towers.task import Batch, InputShard, WeightedLoss, WeightedValue
from towers.updates.schedules import Constant

NUM_CLASSES = 3


def without_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset` without autotune, whose thread may sleep for seconds and so delay an iterator's deletion."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def squared_error(outputs, batch: Batch) -> tf.Tensor:
    """[N] losses against labels of the outputs' shape."""
    error = tf.square(tf.cast(outputs, tf.float32) - batch.labels)
    return tf.reduce_sum(tf.reshape(error, [tf.shape(error)[0], -1]), 1)


def cross_entropy(outputs, batch: Batch) -> tf.Tensor:
    """[N] losses against integer labels."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels, tf.cast(outputs, tf.float32))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TinyTask:
    """Implements `towers.task.Task`.

    Attributes:
      build: makes the model.
      examples: arrays, used as both splits.
      batch_size: examples in a batch; None for all examples.
      losses: function of (outputs, batch) that returns the loss of each example.
    """

    build: Callable[[], keras.Model]
    examples: Batch
    batch_size: int | None = None
    losses: Callable[[Any, Batch], tf.Tensor] = cross_entropy
    # Computing its first batch without a graph would take a tenth of a test; test_first_batches tests the check.
    data_is_checked = True

    def __post_init__(self):
        if self.batch_size is None:
            object.__setattr__(self, "batch_size", self.num_examples("train"))

    def num_examples(self, split: str) -> int:
        return len(tf.nest.flatten(self.examples.features)[0])

    def build_model(self) -> keras.Model:
        return self.build()

    def dataset(self, split: str, shard: InputShard) -> tf.data.Dataset:
        batches = without_autotune(tf.data.Dataset.from_tensor_slices(self.examples).batch(self.batch_size))
        return batches.repeat().skip(shard.first_batch).shard(shard.stride, 0) if split == "train" else batches

    def loss(self, outputs, batch: Batch) -> WeightedLoss:
        losses = self.losses(outputs, batch)
        return WeightedLoss(tf.reduce_sum(losses), tf.cast(tf.size(losses), tf.float32))

    def metrics(self, outputs, batch: Batch) -> dict[str, WeightedValue]:
        total, weight = self.loss(outputs, batch)
        return {"loss_again": WeightedValue(tf.cast(total, tf.float32), weight)}


def images(count: int) -> Batch:
    """`count` random 6x6x3 images of NUM_CLASSES classes."""
    draw = np.random.default_rng(count)
    return Batch(
        draw.normal(size=(count, 6, 6, 3)).astype(np.float32),
        draw.integers(0, NUM_CLASSES, count).astype(np.int32),
    )


def vectors(count: int, width: int = 4) -> Batch:
    """`count` random vectors of NUM_CLASSES classes."""
    draw = np.random.default_rng(count)
    return Batch(
        draw.normal(size=(count, width)).astype(np.float32),
        draw.integers(0, NUM_CLASSES, count).astype(np.int32),
    )


def stacked(shape: tuple[int, ...], *stack: keras.layers.Layer) -> keras.Model:
    """A model of layers in sequence. Not a `Sequential`: its numbered name would be in the variables' paths."""
    inputs = outputs = layers.Input(shape)
    for layer in stack:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


def dense_network() -> keras.Model:
    """A network with one hidden layer from [N, 4] to NUM_CLASSES logits."""
    return stacked((4,), layers.Dense(5, "tanh", name="hidden"), layers.Dense(NUM_CLASSES, name="logits"))


def dense_task(count: int = 8, **fields) -> TinyTask:
    """A task of `count` vectors, by default all in one batch; `fields` are other fields of `TinyTask`."""
    return TinyTask(build=dense_network, examples=vectors(count), **fields)


def trainer_of(
    task, num_towers: int = 1, *, parameters: int = 0, shares=None, rate: float = 0.1, **options
) -> SynchronousStrategy:
    """The strategy 'towers' on logical CPUs; `options` are options of the step."""
    step_options = StepOptions(**{"schedule": Constant(rate), **options})
    return towers_strategy(task, cpus(num_towers, parameters), step_options, shares=shares)


def parameters_of(strategy: SynchronousStrategy) -> dict[str, np.ndarray]:
    """The current parameters, by name."""
    return {name: variable.numpy() for name, variable in strategy.checkpointables()["parameters"].items()}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    """Asserts the same names, and max|a - b| <= tolerance * max|b| for each array."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        apart = np.abs(found[name] - value).max()
        assert apart <= tolerance * np.abs(value).max(), f"{name}: {apart:.2e} apart"
