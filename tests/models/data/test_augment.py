"""Augmentation of a whole batch returns the same images as a plain loop over its examples."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.augment import PADDING, CropFlip, alternately_mirrored, crop_flip, draw_crop_flip, normalise


def one_by_one(images, draws, mode="constant"):
    made = []
    for image, row, column, is_mirrored in zip(images, *(draw.numpy() for draw in draws), strict=True):
        padded = np.pad(image, [(PADDING, PADDING), (PADDING, PADDING), (0, 0)], mode=mode)
        crop = padded[row : row + image.shape[0], column : column + image.shape[1]]
        made.append(crop[:, ::-1] if is_mirrored else crop)
    return np.stack(made)


@settings(max_examples=15, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 4])),
    seed=st.integers(0, 2**40),
)
def test_crops_and_flips_equal_the_plain_loop(shape, seed):
    images = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    draws = draw_crop_flip(len(images), tf.constant([seed, 1], tf.int64))
    np.testing.assert_array_equal(crop_flip(tf.constant(images), draws), one_by_one(images, draws))


def test_padding_by_reflection():
    images = np.random.default_rng(0).integers(0, 256, (7, 8, 9, 3)).astype(np.uint8)
    draws = draw_crop_flip(7, tf.constant([5, 1], tf.int64))
    found = crop_flip(tf.constant(images), draws, fill="reflect")
    np.testing.assert_array_equal(found, one_by_one(images, draws, "reflect"))


def test_alternating_images_are_mirrored_in_every_second_epoch():
    examples = tf.constant([3, 1, 4, 1, 59], tf.int64)
    epochs = [alternately_mirrored(examples, tf.constant(e, tf.int64), 7, 60).numpy() for e in range(4)]
    np.testing.assert_array_equal(epochs[0], ~epochs[1])
    np.testing.assert_array_equal(epochs[0], epochs[2])
    np.testing.assert_array_equal(epochs[1], epochs[3])
    assert epochs[0][1] == epochs[0][3], "both are example 1"
    everyone = alternately_mirrored(tf.range(10_000, dtype=tf.int64), tf.constant(0, tf.int64), 7, 10_000)
    assert 0.47 < everyone.numpy().mean() < 0.53


def test_all_shifts_are_drawn_equally_often():
    draws = draw_crop_flip(9_000, tf.constant([3, 4], tf.int64))
    for starts in (draws.rows, draws.columns):
        counts = np.bincount(starts.numpy(), minlength=9)
        assert counts.shape == (2 * PADDING + 1,) and counts.min() > 850 and counts.max() < 1150
    assert 0.47 < draws.mirrored.numpy().mean() < 0.53
    assert abs(np.corrcoef(draws.rows, draws.columns)[0, 1]) < 0.04


def test_draws_depend_on_both_parts_of_the_seed():
    drawn = [draw_crop_flip(50, tf.constant(seed, tf.int64)).rows.numpy() for seed in ([0, 0], [0, 1], [1, 0])]
    assert not any(np.array_equal(drawn[i], drawn[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_an_empty_batch_stays_empty():
    draws = CropFlip(*(draw[:0] for draw in draw_crop_flip(4, tf.constant([0, 0], tf.int64))))
    assert crop_flip(tf.zeros([0, 8, 8, 3], tf.uint8), draws).shape == (0, 8, 8, 3)


def test_normalisation_is_by_channel():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3)).astype(np.uint8)
    mean, std = np.array([10.0, 120.0, 200.0]), np.array([5.0, 60.0, 1.5])
    made = normalise(tf.constant(images), mean, std)
    assert made.dtype == tf.float32
    np.testing.assert_allclose(made, (images - mean) / std, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [(32, 32, 3), (28, 28, 1)])
def test_image_shapes_are_known_when_traced(size):
    traced = tf.function(
        lambda images: normalise(crop_flip(images, draw_crop_flip(4, [0, 0])), *[[1.0] * size[2]] * 2),
        autograph=False,
    )
    spec = traced.get_concrete_function(tf.TensorSpec([None, *size], tf.uint8))
    assert spec.output_shapes.as_list()[1:] == list(size)
