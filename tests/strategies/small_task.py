"""The task of these tests: a small network on drawn 6x6 images, with batch norm and dropout on request."""

import dataclasses
import functools
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from models.data.image_store import ImageSet, ImageStore
from models.image_task import ImageTask
from strategies.contract import Strategy
from strategies.registry import build_strategy
from tests.towers.logical_cpus import cpus
from towers.devices import Devices
from towers.options import StepOptions
from towers.updates.rules import Momentum
from towers.updates.schedules import Cosine

NUM_TRAIN, NUM_EVAL, NUM_CLASSES = 37, 13, 3
BATCH_SIZE = 8  # five batches an epoch, the last of 5 examples
STEPS_AN_EPOCH = 5


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SmallTask(ImageTask):
    """An image task with a network of dense layers.

    Attributes:
      width: units of each hidden layer.
      depth: number of hidden layers.
      batch_norm: whether a batch norm follows each hidden layer.
      dropout: rate of the dropout before the logits; 0: no such layer.
    """

    width: int = 8
    depth: int = 1
    batch_norm: bool = False
    dropout: float = 0.0

    def build_model(self) -> keras.Model:
        """A model whose layers with variables all have names: Keras's own differ between models of one process."""
        inputs = layers.Input((6, 6, 3))
        outputs = layers.Flatten()(inputs)
        for index in range(self.depth):
            outputs = layers.Dense(self.width, activation="relu", name=f"hidden{index}")(outputs)
            if self.batch_norm:
                outputs = layers.BatchNormalization(momentum=0.8, name=f"norm{index}")(outputs)
        if self.dropout:
            outputs = layers.Dropout(self.dropout, name="dropout")(outputs)
        return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(outputs))


def _open_store(split: str) -> ImageStore:
    count = {"train": NUM_TRAIN, "eval": NUM_EVAL}[split]
    draw = np.random.default_rng(len(split))
    labels = draw.integers(0, NUM_CLASSES, count)
    images = draw.integers(0, 256, (count, 6, 6, 3)) // 2 + 40 * labels[:, None, None, None]
    return ImageStore(images=images.astype(np.uint8), labels=labels, num_classes=NUM_CLASSES, name=split)


def small_task(**changes) -> SmallTask:
    """The plain network without augmentation; `changes` are fields of `SmallTask`."""
    images = ImageSet(
        name="drawn",
        image_shape=(6, 6, 3),
        num_classes=NUM_CLASSES,
        num_examples={"train": NUM_TRAIN, "eval": NUM_EVAL},
        open_store=_open_store,
    )
    plain = {"name": "small", "network": "own", "batch_size": BATCH_SIZE, "augment": False, "seed": 5}
    return SmallTask(images=images, **plain | changes)


def random_task() -> SmallTask:
    """A task with all that a resumed run could get wrong: statistics, dropout masks, augmentation, order."""
    return small_task(batch_norm=True, dropout=0.3, augment=True)


def small_strategy(
    task: SmallTask | None = None, *, name="towers", num_towers=1, devices: Devices | None = None, **options
) -> Strategy:
    """A strategy at step 0, by default with momentum and a learning rate that changes every step."""
    defaults = {"rule": Momentum(momentum=0.9), "schedule": Cosine(0.05, 40), "seed": 3}
    devices = devices or cpus(num_towers)
    return build_strategy(name, task or small_task(), devices, StepOptions(**defaults | options))


def shared_strategy(**options) -> Strategy:
    """`small_strategy(**options)` at step 0, built and traced once for all tests of a process.

    For tests of what happens around the steps. A test that asks twice gets the same strategy, reset.
    """
    strategy, values = _built_once(**options)
    for variable, value in zip(_variables_of(strategy), values, strict=True):
        variable.assign(value)
    strategy.restored()
    return strategy


@functools.cache
def _built_once(**options) -> tuple[Strategy, list[np.ndarray]]:
    """A strategy and the values of its variables at step 0."""
    strategy = small_strategy(**options)
    return strategy, [variable.numpy() for variable in _variables_of(strategy)]


def _variables_of(strategy: Strategy) -> list:
    return tf.nest.flatten(strategy.checkpointables())


def values_of(strategy: Strategy) -> dict[str, np.ndarray]:
    """All values that a checkpoint saves, by 'kind/name'."""
    found = {}

    def gather(prefix, node):
        if isinstance(node, Mapping):
            for name, child in node.items():
                gather(f"{prefix}/{name}" if prefix else name, child)
        else:
            found[prefix] = np.array(node)

    strategy.collect()
    gather("", strategy.checkpointables())
    return found


def assert_same_bits(values: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Asserts that all values are equal to the last bit."""
    assert values.keys() == expected.keys()
    apart = [name for name in expected if values[name].tobytes() != expected[name].tobytes()]
    assert not apart, f"not bit-equal: {', '.join(apart)}"
