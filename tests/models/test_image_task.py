"""ImageTask: its batches, loss and accuracy, and the built-in tasks by name."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.data.augment import PADDING
from models.data.image_store import ImageSet, ImageStore
from models.image_task import ImageTask
from models.tasks import build_task, task_names
from tests.tiers import first_quick
from towers.errors import UserError
from towers.task import Batch, InputShard, Task

COUNTS = {"train": 11, "eval": 5}


def open_store(split):
    random = np.random.default_rng(len(split))
    count = COUNTS[split]
    images = random.integers(0, 256, (count, 8, 8, 3)).astype(np.uint8)
    return ImageStore(images=images, labels=np.arange(count) % 3, num_classes=3)


def image_task(**fields):
    images = ImageSet(
        name="tiny", image_shape=(8, 8, 3), num_classes=3, num_examples=COUNTS, open_store=open_store
    )
    return ImageTask(**{"name": "tiny", "images": images, "network": "classic_cnn", "batch_size": 4} | fields)


def read(task, split="train", num_batches=3, **shard):
    return [
        tf.nest.map_structure(lambda tensor: tensor.numpy(), batch)
        for batch in task.dataset(split, InputShard(**shard)).take(num_batches)
    ]


def test_it_implements_the_protocol():
    task = image_task()
    assert isinstance(task, Task)
    assert (task.num_examples("train"), task.num_examples("eval"), task.eval_batch_size) == (11, 5, 4)


def test_the_model_maps_images_to_logits_of_the_classes():
    (batch,) = read(image_task(), num_batches=1)
    model = image_task().build_model()
    assert model(batch.features).shape == (4, 3)


@pytest.mark.parametrize("augment", first_quick([True, False]))
@pytest.mark.parametrize("shares", first_quick([((1.0, 3.0, 1.0),), None]))
def test_readers_parts_make_up_the_augmented_batches(augment, shares):
    task = image_task(augment=augment)
    whole = read(task, num_batches=4)
    parts = [read(task, num_batches=4, index=index, count=3, shares=shares) for index in range(3)]
    for index, batch in enumerate(whole):
        joined = np.concatenate([part[index].features for part in parts])
        np.testing.assert_array_equal(joined, batch.features)
        np.testing.assert_array_equal(np.concatenate([part[index].labels for part in parts]), batch.labels)


def test_a_dataset_made_in_a_graph_has_the_same_batches():
    # tf.distribute traces the dataset functions of a cluster.
    task, (expected,) = image_task(), read(image_task(), num_batches=1)

    @tf.function(autograph=False)
    def is_same():
        batch = task.dataset("train", InputShard()).take(1).get_single_element()
        return tf.reduce_all(batch.features == expected.features)

    assert is_same()


def test_a_stream_that_starts_later_is_augmented_the_same():
    later = read(image_task(), num_batches=1, first_batch=5)[0]
    np.testing.assert_array_equal(later.features, read(image_task(), num_batches=6)[5].features)


def test_the_number_of_threads_changes_nothing():
    one, two = (read(image_task(num_input_threads=threads), num_batches=6) for threads in (1, 2))
    for mine, other in zip(one, two, strict=True):
        np.testing.assert_array_equal(mine.features, other.features)


def test_each_epoch_is_augmented_differently():
    task = image_task(batch_size=11)
    first, second = read(task, num_batches=2)
    by_label = [batch.features[np.argsort(batch.labels, kind="stable")] for batch in (first, second)]
    assert not np.array_equal(*by_label)


def test_images_are_normalised_by_the_statistics_of_the_training_split():
    task = image_task(augment=False)
    (batch,) = read(dataclasses.replace(task, batch_size=11), num_batches=1)
    np.testing.assert_allclose(batch.features.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(batch.features.std((0, 1, 2)), 1, atol=1e-5)


@pytest.mark.parametrize("padding", first_quick([PADDING, 0, 2]))
def test_augmentation_is_a_shift_of_at_most_the_padding(padding):
    plain, moved = (
        read(image_task(augment=augment, crop_padding=padding), num_batches=1)[0].features[0]
        for augment in (False, True)
    )
    black = (0 - np.array(image_task().images.statistics[0])) / np.array(image_task().images.statistics[1])
    padded = np.tile(black.astype(np.float32), (8 + 2 * padding, 8 + 2 * padding, 1))
    padded[padding : padding + 8, padding : padding + 8] = plain
    starts = range(2 * padding + 1)
    crops = [padded[r : r + 8, c : c + 8] for r in starts for c in starts]
    assert any(
        np.allclose(moved, crop, atol=1e-5) or np.allclose(moved[:, ::-1], crop, atol=1e-5) for crop in crops
    )


def test_alternating_flips_show_both_orientations_in_two_epochs():
    """Each epoch has three batches, of the same images in another order."""
    task = image_task(augment=True, crop_padding=0, flip="alternating")
    plain = image_task(augment=False)
    batches = [read(one, num_batches=6) for one in (task, plain)]
    mirrored = {}
    for index, (found, expected) in enumerate(zip(*batches, strict=True)):
        for image, original in zip(found.features, expected.features, strict=True):
            is_mirrored = np.allclose(image, original[:, ::-1], atol=1e-5)
            assert is_mirrored or np.allclose(image, original, atol=1e-5)
            mirrored.setdefault(original.tobytes(), []).append((index // 3, is_mirrored))
    assert len(mirrored) == 11
    assert all(len(both) == 2 and both[0][1] != both[1][1] for both in mirrored.values())


def test_evaluation_is_in_order_and_without_augmentation():
    batches = read(image_task(), "eval", num_batches=9)
    assert [batch.labels.tolist() for batch in batches] == [[0, 1, 2, 0], [1]]
    again = read(image_task(eval_batch_size=5), "eval")[0].features
    np.testing.assert_array_equal(np.concatenate([batch.features for batch in batches]), again)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [(), [0.0, 1.0, 2.0, 0.5]])
def test_loss_is_the_sum_of_keras_losses(smoothing, weights):
    logits = tf.random.stateless_normal([4, 3], [1, 2]) * 3
    labels = tf.constant([0, 2, 1, 1], tf.int64)
    keras_loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing, reduction=None)
    values = keras_loss(tf.one_hot(labels, 3), logits).numpy()
    task = image_task(label_smoothing=smoothing)
    batch = Batch(tf.zeros([4, 8, 8, 3]), labels, weights if weights == () else tf.constant(weights))
    loss = task.loss(logits, batch)
    expected = np.ones(4) if weights == () else np.array(weights)
    np.testing.assert_allclose(loss.total, (values * expected).sum(), rtol=1e-5)
    assert float(loss.weight) == expected.sum()


def test_loss_is_computed_in_float32():
    logits = tf.constant([[100.0, 99.0, 0.0]], tf.bfloat16)
    loss = image_task().loss(logits, Batch((), tf.constant([1], tf.int64)))
    assert loss.total.dtype == tf.float32
    np.testing.assert_allclose(loss.total, np.log1p(np.e), rtol=1e-5)


def test_accuracy_is_weighted():
    logits = tf.one_hot([0, 1, 2, 2], 3)
    batch = Batch((), tf.constant([0, 1, 0, 2], tf.int64), tf.constant([1.0, 2.0, 4.0, 0.0]))
    accuracy = image_task().metrics(logits, batch)["accuracy"]
    assert (float(accuracy.total), float(accuracy.weight)) == (3.0, 7.0)


def test_an_empty_batch_has_weight_zero():
    batch = Batch(tf.zeros([0, 8, 8, 3]), tf.zeros([0], tf.int64))
    loss = image_task().loss(tf.zeros([0, 3]), batch)
    assert (float(loss.total), float(loss.weight)) == (0.0, 0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_size": 0},
        {"eval_batch_size": 0},
        {"label_smoothing": 1.0},
        {"num_input_threads": 0},
        {"crop_fill": "white"},
        {"crop_padding": 8, "crop_fill": "reflect"},
        {"flip": "never"},
    ],
)
def test_wrong_fields_are_refused(fields):
    with pytest.raises(UserError) as error:
        image_task(**fields)
    assert next(iter(fields)) in str(error.value) and "\n" not in str(error.value)


def test_unknown_split_is_refused():
    with pytest.raises(UserError, match="split='test': must be 'train' or 'eval'"):
        image_task().dataset("test", InputShard())


def test_an_unknown_task_is_refused_with_the_nearest_name():
    for given, meant in (("shaeps", "'shapes'"), ("mnist", "'tfds:mnist', a set of TFDS")):
        with pytest.raises(UserError, match=f"did you mean {meant}"):
            build_task(given, network="classic_cnn", batch_size=4)
    assert task_names() == ("shapes", "cifar10", "clicks", "text", "tfds:NAME")


def test_the_shapes_task_draws_nothing_before_its_first_use():
    task = build_task("shapes", network="classic_cnn", batch_size=64, seed=3)
    assert not {"train", "evaluation"} & set(vars(task.images))
    assert (task.num_examples("train"), task.augment, task.seed) == (7_680, False, 3)
    with pytest.raises(UserError, match="batch_size=0"):
        build_task("shapes", network="classic_cnn", batch_size=0)
