"""Batches that towers prepare have the bits that the host would compute, by operations with GPU kernels."""

import numpy as np
import pytest
import tensorflow as tf

from models.data.augment import PADDING, crop_flip, draw_crop_flip
from models.data.augment_on_device import RawImages, crop_flip_on_device
from models.data.image_store import ImageSet, ImageStore
from models.image_task import ImageTask
from tests.tiers import first_quick
from tests.towers.gpu_kernels import on_host_in
from towers.input.tower_parts import open_length
from towers.input.unprepared import PreparesOnDevice, with_features
from towers.task import InputShard


def task_of(**fields):
    draw = np.random.default_rng(0)
    store = ImageStore(
        images=draw.integers(0, 256, (11, 7, 9, 3)).astype(np.uint8), labels=np.arange(11) % 3, num_classes=3
    )
    images = ImageSet(
        name="tiny",
        image_shape=(7, 9, 3),
        num_classes=3,
        num_examples={"train": 11, "eval": 11},
        open_store=lambda split: store,
    )
    return ImageTask(name="tiny", images=images, network="tiny", batch_size=4, **fields)


@pytest.mark.parametrize("fill", ["black", "reflect"])
@pytest.mark.parametrize("padding", [PADDING, 0])
def test_the_same_pixels_as_on_the_host(fill, padding):
    images = tf.constant(np.random.default_rng(1).integers(0, 256, (40, 7, 9, 3)).astype(np.uint8))
    draws = draw_crop_flip(40, tf.constant([5, 1], tf.int64), padding)
    found = crop_flip_on_device(images, RawImages.of(images, draws).draws, padding, fill)
    np.testing.assert_array_equal(tf.cast(found, tf.uint8), crop_flip(images, draws, padding, fill))


@pytest.mark.parametrize(
    "fields",
    first_quick([{"flip": "alternating", "crop_fill": "reflect"}, {}, {"crop_padding": 2}, {"augment": False}]),
)
def test_prepared_batches_are_the_tasks_batches(fields):
    """Also for one reader's part and for a short batch, in both splits."""
    task = task_of(**fields)
    assert isinstance(task, PreparesOnDevice)
    for split in ("train", "eval"):
        shard = InputShard(index=1, count=2, first_batch=1)
        raw = task.unprepared_dataset(split, shard).take(3)
        for expected, given in zip(task.dataset(split, shard).take(3), raw, strict=True):
            assert given.features.values.images.dtype == tf.uint8
            prepared = tf.function(lambda batch: with_features(task, batch), autograph=False)(given)
            np.testing.assert_array_equal(prepared.features, expected.features)
            np.testing.assert_array_equal(prepared.labels, expected.labels)


@pytest.mark.parametrize("fill", first_quick(["reflect", "black"]))
def test_gpus_have_kernels_for_the_preparation(fill):
    task = task_of(crop_fill=fill)
    spec = open_length(task.unprepared_dataset("train", InputShard()).element_spec)
    prepare = tf.function(lambda batch: with_features(task, batch).features, autograph=False)
    assert on_host_in(prepare.get_concrete_function(spec).graph) == []


def test_the_hosts_own_crops_would_stay_on_the_host():
    images = tf.TensorSpec([None, 8, 8, 3], tf.uint8)
    crop = tf.function(lambda images: crop_flip(images, draw_crop_flip(4, [0, 0])), autograph=False)
    found = on_host_in(crop.get_concrete_function(images).graph)
    assert any("GatherV2" in name for name in found)
