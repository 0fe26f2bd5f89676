"""A task with a table whose gradients are sparse and two matrices, for tests of where parameters live."""

import keras
import numpy as np
from keras import layers

from strategies.registry import build_strategy
from strategies.synchronous import SynchronousStrategy
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, vectors
from towers.devices import Devices
from towers.options import StepOptions
from towers.task import Batch
from towers.updates.schedules import Constant


def task() -> TinyTask:
    """A table of 40 rows, which two and three owners slice, and two matrices."""

    def build():
        words = layers.Input((3,), dtype="int32")
        outputs = layers.Flatten(name="flat")(layers.Embedding(40, 6, name="table")(words))
        outputs = layers.Dense(20, "relu", name="hidden")(outputs)
        return keras.Model(words, layers.Dense(NUM_CLASSES, name="logits")(outputs))

    words = np.random.default_rng(0).integers(0, 40, (8, 3)).astype(np.int32)
    return TinyTask(build=build, examples=Batch(words, vectors(8).labels))


def trained(devices: Devices, rule, *, steps: int = 5, **options) -> SynchronousStrategy:
    """The strategy 'towers' after some steps on that task."""
    options = StepOptions(rule=rule, schedule=Constant(0.1), **options)
    strategy = build_strategy("towers", task(), devices, options)
    if steps:
        strategy.run_steps(steps)
    return strategy
