"""A task's data stay in the host's memory, whatever device operations use by default.

On a machine with GPUs the default device is GPU:0. Here it is the second CPU, and every operation is watched.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from models.data.image_store import ImageSet, ImageStore
from models.image_task import ImageTask
from models.own_task import OwnTask
from models.tasks import build_task
from strategies.registry import build_strategy
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from towers.options import StepOptions
from towers.updates.rules import Momentum
from towers.updates.schedules import Constant

SECOND = "CPU:1"
# Scalars and shapes are the host's anyway; no array of a set or of a model below is so small.
_SMALL_BYTES = 256


@contextlib.contextmanager
def placed_on_second():
    """Context manager: the second CPU is the default device; yields the tensors on it, with their operations."""
    found = []

    def watch(kind, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is None:
            tensors = [tensor for tensor in (*inputs, *outputs) if tensor.dtype not in (tf.resource, tf.variant)]
            found.extend(
                f"{kind}: {tensor.dtype.name} {tensor.shape}"
                for tensor in tensors
                if tensor.device.endswith(SECOND)
                and tensor.dtype.size * tensor.shape.num_elements() > _SMALL_BYTES
            )

    op_callbacks.add_op_callback(watch)
    try:
        with tf.device(f"/device:{SECOND}"):
            yield found
    finally:
        op_callbacks.remove_op_callback(watch)


def pixels(count=200):
    return np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3)).astype(np.uint8), np.arange(count) % 3


def image_task():
    def open_store(split):
        images, labels = pixels()
        return ImageStore(images=images, labels=labels, num_classes=3)

    images = ImageSet(
        name="drawn",
        image_shape=(8, 8, 3),
        num_classes=3,
        num_examples={"train": 200, "eval": 200},
        open_store=open_store,
    )
    return ImageTask(name="drawn", images=images, network="tiny", batch_size=20)


def own_task():
    def model():
        return keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(3)])

    images, labels = pixels()
    data = (images.astype(np.float32), labels)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return OwnTask(model=model, train_data=data, eval_data=data, losses=losses, batch_size=20)


TASKS = {
    "images": image_task,
    "own": own_task,
    "shapes": lambda: build_task("shapes", network="tiny", batch_size=20),
    "clicks": lambda: build_task("clicks", network="dlrm", batch_size=20),
    "text": lambda: build_task("text", network="transformer_tiny", batch_size=20),
}


@pytest.mark.parametrize("name", first_quick(TASKS, 2))
def test_no_data_go_to_the_default_device(name):
    """From the task to its model, a strategy, a batch, and the exported model."""
    with placed_on_second() as found:
        task = TASKS[name]()
        made = build_strategy("towers", task, cpus(1), StepOptions(rule=Momentum(), schedule=Constant(0.1)))
        made._next_batch(0)
        made.evaluate(1)
        made.portable_model()
    assert not found, found


def test_an_unplaced_array_is_seen():
    with placed_on_second() as found:
        tf.gather(tf.constant(pixels()[0]), [0, 1])
    assert found
