"""The parts of the fast recipe: whitened patches, convolutions that start as the identity, test-time views."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from models.data.augment import normalise
from models.image_task import ImageTask
from models.networks.cifar_fast import PATCH, WHITENING, cifar_fast
from models.networks.registry import weights_from_data
from models.networks.views import with_test_time_views
from models.networks.whitening import whitening_kernel
from models.tasks import build_task
from tests.towers.user_errors import refused


@pytest.fixture(scope="module")
def network():
    keras.utils.set_random_seed(0)
    return cifar_fast()


def smooth_images(count: int = 40) -> np.ndarray:
    """Images whose neighbouring pixels are similar, as in photographs."""
    noise = np.random.default_rng(0).normal(size=(count, 16, 16, 3))
    return (noise.cumsum(1).cumsum(2) / 4).astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_whitened_patches_are_uncorrelated(size):
    images = smooth_images()
    kernel = whitening_kernel(images, size)
    half = size * size * 3
    assert kernel.shape == (size, size, 3, 2 * half)
    np.testing.assert_array_equal(kernel[..., half:], -kernel[..., :half])
    outputs = keras.ops.conv(images, kernel, padding="valid").numpy().reshape(-1, 2 * half)[:, :half]
    second_moments = outputs.T @ outputs / len(outputs)
    off = second_moments - np.diag(np.diag(second_moments))
    assert np.abs(off).max() < 1e-2
    # Directions with much variance in the images come out with variance 1, the others with less.
    assert np.diag(second_moments).max() == pytest.approx(1.0, abs=1e-3)


def test_the_whitening_kernel_is_frozen_and_its_bias_is_trained(network):
    trained = {variable.path for variable in network.trainable_variables}
    assert f"{WHITENING}/bias" in trained
    assert f"{WHITENING}/kernel" not in trained


def kernel_of(model) -> np.ndarray:
    return np.array(model.get_layer(WHITENING).kernel)


@pytest.mark.full
def test_a_task_whitens_with_its_first_training_images():
    task = build_task("shapes", network="cifar_fast", batch_size=8)
    images, _ = task.images.train.gather(tf.range(5000, dtype=tf.int64))
    expected = whitening_kernel(normalise(images, *task.images.statistics).numpy(), PATCH)
    assert expected.shape == (PATCH, PATCH, 3, 24)
    np.testing.assert_array_equal(kernel_of(task.build_model()), expected)


@pytest.mark.full
def test_a_task_computes_the_kernel_once(monkeypatch):
    task = build_task("shapes", network="cifar_fast", batch_size=8)
    first = kernel_of(task.build_model())
    monkeypatch.setattr(ImageTask, "_sample_images", None)
    np.testing.assert_array_equal(kernel_of(task.build_model()), first)


def test_a_network_that_needs_no_images_reads_none():
    task = build_task("shapes", network="classic_cnn", batch_size=8)
    task.build_model()
    assert not {"train", "evaluation"} & set(vars(task.images))
    assert weights_from_data("resnet20", None) == {}


def test_convolutions_start_as_the_identity(network):
    for name, inputs in (("block1_conv1", 24), ("block1_conv2", 64), ("block2_conv1", 64), ("block3_conv2", 256)):
        layer = network.get_layer(name)
        images = np.random.default_rng(0).normal(size=(2, 6, 6, inputs)).astype(np.float32)
        np.testing.assert_array_equal(layer(images)[..., :inputs], images)
    rest = np.array(network.get_layer("block1_conv1").kernel)[..., 24:]
    assert np.abs(rest).max() == pytest.approx((9 * 24) ** -0.5, rel=0.01)


def shifted(images: np.ndarray, rows: int, columns: int) -> np.ndarray:
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="reflect")
    return padded[:, 1 + rows : 33 + rows, 1 + columns : 33 + columns]


def test_logits_are_averaged_over_the_views(network, tmp_path):
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)

    views = [images, shifted(images, -1, -1), shifted(images, 1, 1)]
    logits = network(np.concatenate([*views, *(view[:, :, ::-1] for view in views)])).numpy()
    expected = np.average(logits.reshape(6, 2, -1), 0, [2, 1, 1, 2, 1, 1])
    model = with_test_time_views(network)
    np.testing.assert_allclose(model(images).numpy(), expected, rtol=1e-4, atol=1e-5)
    model.save(tmp_path / "views.keras")
    again = keras.models.load_model(tmp_path / "views.keras")
    np.testing.assert_allclose(again(images).numpy(), expected, rtol=1e-4, atol=1e-5)
    assert {type(layer).__module__.partition(".")[0] for layer in again.layers} == {"keras"}


def test_views_need_a_model_of_images():
    inputs = layers.Input((4,))
    with refused("test_time_views", "not one image"):
        with_test_time_views(keras.Model(inputs, layers.Dense(2)(inputs), name="line"))
