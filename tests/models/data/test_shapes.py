"""The drawn set is the same on every machine, balanced, and drawn fast."""

import hashlib

import numpy as np

from models.data.image_store import channel_statistics
from models.data.shapes import CLASS_NAMES, NUM_EVAL, NUM_TRAIN, drawn, shapes_images, shapes_set

IMAGES_SHA256, LABELS_SHA256 = "09a87a1a9243291e", "c880ed43fe650c6f"


def test_pixels_are_the_same_on_every_machine():
    images, labels = shapes_images(1_100)
    assert hashlib.sha256(images.tobytes()).hexdigest()[:16] == IMAGES_SHA256
    assert hashlib.sha256(labels.tobytes()).hexdigest()[:16] == LABELS_SHA256


def test_another_seed_draws_other_images():
    assert not np.array_equal(shapes_images(20, seed=1)[0], shapes_images(20, seed=2)[0])


def test_the_statistics_are_those_of_the_training_images():
    images = shapes_set()
    assert (images.known_mean, images.known_std) == channel_statistics(images.train)


def test_the_set_is_balanced():
    images, labels = drawn()
    assert images.shape == (8_960, 32, 32, 3) and images.dtype == np.uint8
    assert np.bincount(labels).tolist() == [896] * len(CLASS_NAMES)


def test_train_and_held_out_images_differ():
    images = shapes_set()
    assert (images.train.num_examples, images.evaluation.num_examples) == (NUM_TRAIN, NUM_EVAL)
    train = {image.tobytes() for image in images.train.images.numpy()}
    assert len(train) == NUM_TRAIN
    assert not any(image.tobytes() in train for image in images.evaluation.images.numpy())


def test_colour_alone_does_not_predict_the_class():
    # A classifier by the nearest class mean of the channels' averages must be right about as often as chance.
    images, labels = shapes_images(4_000)
    colours = images.mean((1, 2))
    centres = np.stack([colours[:2_000][labels[:2_000] == kind].mean(0) for kind in range(10)])
    guesses = np.square(colours[2_000:, None] - centres).sum(-1).argmin(1)
    assert (guesses == labels[2_000:]).mean() < 0.2
