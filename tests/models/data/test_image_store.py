"""ImageStore and ImageSet: the data that they accept, return and refuse."""

import numpy as np
import pytest
import tensorflow as tf

from models.data.image_store import ImageSet, ImageStore, channel_statistics
from towers.errors import UserError

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3)).astype(np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def store(images=IMAGES, labels=LABELS, num_classes=3):
    return ImageStore(images=images, labels=labels, num_classes=num_classes, name="mine")


def test_gathers_by_index():
    images, labels = store().gather(tf.constant([4, 0, 4], tf.int64))
    np.testing.assert_array_equal(images, IMAGES[[4, 0, 4]])
    np.testing.assert_array_equal(labels, [1, 0, 1])
    assert labels.dtype == tf.int64 and images.dtype == tf.uint8


def test_gathers_no_images():
    images, labels = store().gather(tf.zeros([0], tf.int64))
    assert images.shape == (0, 4, 5, 3) and labels.shape == (0,)


def test_images_are_in_the_hosts_memory():
    assert "CPU" in store().images.device


@pytest.mark.parametrize(
    "change, said",
    [
        ({"labels": np.array([0, 1, 7, 0, -1, 2])}, "label 7 (example 2; 2 such labels)"),
        ({"num_classes": 2}, "with num_classes=2, labels are 0 to 1"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "0 images"),
        ({"images": IMAGES.astype(np.float32)}, "float32"),
        ({"images": IMAGES[..., 0]}, "[6, 4, 5]"),
        ({"labels": LABELS[:5]}, "for 6 images"),
        ({"labels": LABELS.astype(float)}, "float64"),
    ],
)
def test_wrong_images_and_labels_are_refused_in_one_line(change, said):
    with pytest.raises(UserError) as error:
        store(**change)
    assert said in str(error.value) and "mine" in str(error.value) and "\n" not in str(error.value)


def test_statistics_are_those_of_the_pixels():
    mean, std = channel_statistics(store())
    np.testing.assert_allclose(mean, IMAGES.mean((0, 1, 2)))
    np.testing.assert_allclose(std, IMAGES.std((0, 1, 2)))


def test_a_constant_channel_has_deviation_one():
    assert channel_statistics(store(images=np.full_like(IMAGES, 9))) == ((9.0,) * 3, (1.0,) * 3)


def image_set(opened, **known):
    def open_store(split):
        opened.append(split)
        return store()

    return ImageSet(
        name="mine",
        image_shape=(4, 5, 3),
        num_classes=3,
        num_examples={"train": 6, "eval": 6},
        open_store=open_store,
        **known,
    )


def test_a_set_opens_a_store_at_its_first_use_and_once():
    opened = []
    images = image_set(opened)
    assert opened == []
    assert images.train is images.train and opened == ["train"]
    assert images.statistics == channel_statistics(store()) and opened == ["train"]


def test_known_statistics_read_nothing():
    opened = []
    assert image_set(opened, known_mean=(1.0,), known_std=(2.0,)).statistics == ((1.0,), (2.0,)) and not opened


def test_a_store_is_opened_outside_the_graph_that_reads_it():
    images = image_set([])

    @tf.function
    def first():
        return images.train.gather(tf.constant([0], tf.int64))[0]

    np.testing.assert_array_equal(first(), IMAGES[:1])
    assert isinstance(images.train.images, tf.Tensor) and images.train.images.numpy().shape == IMAGES.shape
