"""The first batches show whether data are the same for all processes, shuffled, augmented, or different."""

import numpy as np
import pytest
import tensorflow as tf

from models.own_task import OwnTask
from strategies.data_checks.batch_checksums import NUM_COMPARED, BatchChecksums, batch_checksums
from tests.strategies.data_checks.test_first_batches import SPARSE, X, Y, build
from tests.tiers import first_quick

DRAWS = np.random.default_rng(0)


def noisy(features, labels):
    noise = tf.numpy_function(lambda: np.float32(DRAWS.random()), [], tf.float32)
    return features + tf.ensure_shape(noise, []), labels


def flipped_sometimes(features, labels):
    draw = tf.ensure_shape(tf.numpy_function(lambda: np.float32(DRAWS.random()), [], tf.float32), [])
    return tf.where(draw < 0.5, features[::-1], features), labels


def checksums(arrays=(X, Y), *, seed=None, reshuffles=None, augment=None) -> BatchChecksums:
    rows = tf.data.Dataset.from_tensor_slices(arrays)
    if reshuffles is not None:
        rows = rows.shuffle(60, seed=seed, reshuffle_each_iteration=reshuffles)
    rows = rows if augment is None else rows.map(augment)
    task = OwnTask(model=build, train_data=rows.batch(10), losses=SPARSE, batch_size=10)
    return batch_checksums(task, "train")


def test_data_that_are_the_same_at_each_reading():
    found = checksums()
    assert found.keeps_order
    assert len(found.examples) == len(found.features) == NUM_COMPARED
    assert found == checksums()
    assert checksums(seed=1, reshuffles=False) == checksums(seed=1, reshuffles=False)


def test_they_cover_features_labels_and_weights():
    """A change of the last number in the first batches is seen."""
    arrays, found = [X.copy(), np.stack([Y, Y], axis=1), np.ones(60, np.float32)], []
    for change in (None, 0, 1, 2):
        changed = [array.copy() for array in arrays]
        if change is not None:
            changed[change][39] += 1
        found.append(checksums(tuple(changed)))
    plain, features, labels, weights = found
    assert features.examples == plain.examples and features.features != plain.features
    assert labels.examples != plain.examples and labels.features == plain.features
    assert weights.examples != plain.examples and weights.features == plain.features


@pytest.mark.parametrize("arrays", [(X, Y), (X, 0 * Y), (X,)], ids=["labels", "the same labels", "no labels"])
def test_data_in_another_order_at_each_reading(arrays):
    assert not checksums(arrays, seed=3, reshuffles=True).keeps_order


@pytest.mark.parametrize("augment", first_quick([noisy, flipped_sometimes]))
@pytest.mark.parametrize("arrays", [(X, Y), (X, 0 * Y)], ids=["labels", "the same labels"])
def test_random_augmentation_keeps_the_order_and_is_not_compared(arrays, augment):
    found = checksums(arrays, augment=augment)
    assert found.keeps_order and not found.features
    assert found.examples == checksums(arrays).examples


def test_features_that_are_texts():
    texts = np.array([f"text {index}" for index in range(60)])
    found = checksums((texts, Y))
    assert found.keeps_order and found.features
    assert not checksums((texts, Y), seed=3, reshuffles=True).keeps_order


def test_numbers_hold_all_of_it():
    for found in (BatchChecksums(), checksums(), checksums(augment=noisy), checksums(seed=3, reshuffles=True)):
        assert BatchChecksums.from_numbers(found.numbers(NUM_COMPARED)) == BatchChecksums(
            examples=list(found.examples), features=list(found.features), keeps_order=found.keeps_order
        )
