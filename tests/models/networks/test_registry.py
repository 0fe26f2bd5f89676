"""The networks: their costs, their outputs, and that saving, naming and initial weights are reproducible."""

import functools
import importlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from models.networks.local_response import local_response_normalization
from models.networks.registry import build_network, network_names
from models.networks.resnet import resnet
from tests.models.networks.counts import count_multiply_adds, count_parameters
from tests.tiers import first_quick
from towers.errors import UserError

# network: (module whose docstring states the costs, parameters, forward multiply-adds of one example)
COSTS = {
    "tiny": ("tiny", 5_346, 18_944),
    "classic_cnn": ("classic_cnn", 1_756_426, 32_778_112),
    "alexnet": ("alexnet", 7_706_442, 225_650_688),
    "vgg16": ("vgg", 14_986_698, 313_463_808),
    "resnet20": ("resnet", 272_282, 40_813_184),
    "resnet32": ("resnet", 466_714, 69_124_736),
    "resnet56": ("resnet", 855_578, 125_747_840),
    "resnet110": ("resnet", 1_730_522, 253_149_824),
    "inception": ("inception", 1_573_386, 123_978_752),
    "cifar_fast": ("cifar_fast", 1_971_352, 118_147_360),
}
# Tests that run the network omit the deeper ResNets, which are the same code as resnet20.
SHALLOW = [name for name in COSTS if name not in ("resnet32", "resnet56", "resnet110")]

LOAD_AND_RUN = """
import sys
import keras, numpy as np
assert not any(name.split(".")[0] in ("models", "towers") for name in sys.modules)
images = np.load("images.npy")
for name in sys.argv[1:]:
    np.save(f"{name}.npy", keras.models.load_model(f"{name}.keras")(images, training=False))
"""


def build(name, **sizes):
    return build_network(name, **{"image_shape": (32, 32, 3), "num_classes": 10} | sizes)


@functools.cache
def built(name):
    """A network with weights of seed 7, shared by the tests that don't change it."""
    return of_seed(7, name)


def of_seed(seed, name):
    keras.utils.set_random_seed(seed)
    return build(name)


def draw_images(num_images=2, shape=(32, 32, 3)):
    return np.random.default_rng(0).normal(size=(num_images, *shape)).astype("float32")


@pytest.fixture
def mixed_bfloat16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy(before)


def test_every_network_has_a_row():
    assert set(network_names()) == set(COSTS)


@pytest.mark.parametrize("name", first_quick(COSTS, 2))
def test_costs_are_those_in_the_docstring(name):
    module, parameters, multiply_adds = COSTS[name]
    assert count_parameters(built(name)) == parameters
    assert count_multiply_adds(built(name)) == multiply_adds
    text = importlib.import_module(f"models.networks.{module}").__doc__
    lines = text.splitlines()
    stated = next(line for line in lines if name in line) if module == "resnet" else text
    assert f"{parameters:,} parameters" in stated
    assert f"{multiply_adds:,} multiply-adds" in stated


def test_counts_of_a_small_network_equal_those_by_hand():
    inputs = layers.Input((8, 6, 4))
    x = layers.Conv2D(10, 3, strides=2, padding="same", groups=2)(inputs)  # 3*3*2*10 at 4*3 positions
    x = layers.DepthwiseConv2D(3, padding="valid", depth_multiplier=2)(x)  # 3*3*10*2 at 2*1 positions
    inner = keras.Sequential([layers.Input((2, 1, 20)), layers.Dense(7)])  # 20*7 at 2*1 positions
    model = keras.Model(inputs, layers.BatchNormalization()(inner(x)))
    assert count_multiply_adds(model) == 180 * 12 + 180 * 2 + 140 * 2
    assert count_parameters(model) == (180 + 10) + (180 + 20) + (140 + 7) + 2 * 7


def test_counting_needs_fixed_sizes():
    inputs = layers.Input((None, 8, 3))
    model = keras.Model(inputs, layers.Conv2D(4, 3, name="conv")(inputs))
    with pytest.raises(UserError, match="layer 'conv'.*fixed height and width"):
        count_multiply_adds(model)


@pytest.mark.parametrize("name", first_quick(COSTS, 2))
def test_networks_have_only_stock_layers(name):
    for layer in built(name)._operations:
        assert type(layer).__module__.startswith("keras."), layer
        assert not isinstance(layer, layers.Lambda)


@pytest.mark.parametrize("name", first_quick(SHALLOW, 2))
def test_other_image_sizes_and_float32_logits_under_mixed_precision(name, mixed_bfloat16):
    model = build(name, image_shape=(19, 28, 1), num_classes=3)
    assert model.output.dtype == "float32"
    assert {layer.compute_dtype for layer in model.layers if layer.weights} == {"bfloat16", "float32"}
    logits = model(draw_images(shape=(19, 28, 1)), training=False)
    assert logits.dtype == tf.float32
    assert logits.shape == (2, 3)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("name", first_quick(SHALLOW, 2))
def test_gradients_are_finite_and_reach_every_variable(name):
    model = build(name)
    with tf.GradientTape() as tape:
        logits = model(draw_images(4), training=True)
        loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1, 2, 3], logits))
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        assert np.isfinite(gradient).all(), variable.path
        assert np.any(gradient), variable.path


@pytest.mark.full
def test_saved_networks_load_without_this_project(tmp_path):
    images = draw_images()
    np.save(tmp_path / "images.npy", images)
    expected = {}
    for name in SHALLOW:
        model = built(name)
        model.save(tmp_path / f"{name}.keras")
        expected[name] = model(images, training=False)
    command = [sys.executable, "-I", "-c", LOAD_AND_RUN, *expected]
    loaded = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert loaded.returncode == 0, loaded.stderr
    for name, logits in expected.items():
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), logits, rtol=1e-6, atol=1e-5, err_msg=name)


def test_network_saved_under_mixed_precision_loads_with_its_dtypes(tmp_path, mixed_bfloat16):
    model = build("classic_cnn")
    model.save(tmp_path / "mixed.keras")
    keras.config.set_dtype_policy("float32")
    loaded = keras.models.load_model(tmp_path / "mixed.keras")
    images = draw_images()
    np.testing.assert_allclose(loaded(images), model(images), atol=1e-5)


@pytest.mark.parametrize("name", first_quick(SHALLOW, 2))
def test_the_same_seed_gives_the_same_weights_and_paths(name):
    first, second = built(name), of_seed(7, name)
    assert first.name == second.name == name
    paths = [variable.path for variable in first.variables]
    assert paths == [variable.path for variable in second.variables]
    assert len(set(paths)) == len(paths)
    for one, other in zip(first.variables, second.variables, strict=True):
        assert np.array_equal(one, other), one.path


@pytest.mark.full
def test_another_seed_gives_other_weights():
    first, other = (network.get_layer("stem").kernel for network in (built("resnet20"), of_seed(8, "resnet20")))
    assert np.any(np.asarray(other) != np.asarray(first))


@pytest.mark.parametrize(("channels", "depth_radius"), [(64, 4), (5, 4), (3, 1), (1, 2)])
def test_local_response_equals_tensorflows(channels, depth_radius):
    images = tf.constant(30 * draw_images(shape=(5, 4, channels)))
    settings = {"depth_radius": depth_radius, "bias": 1.0, "alpha": 0.001 / 9}
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(images)
        ours = local_response_normalization(images, **settings)
        theirs = tf.nn.local_response_normalization(images, beta=0.75, **settings)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    # TensorFlow's gradient sums in another order: the tolerance is relative to gradients near 1.
    np.testing.assert_allclose(tape.gradient(ours, images), tape.gradient(theirs, images), atol=1e-5)


def test_local_response_normalises_in_bfloat16():
    images = tf.cast(30 * draw_images(shape=(5, 4, 64)), tf.bfloat16)
    ours = local_response_normalization(images)
    theirs = tf.nn.local_response_normalization(tf.cast(images, tf.float32), 4, 1.0, 0.001 / 9, 0.75)
    assert ours.dtype == tf.bfloat16
    np.testing.assert_allclose(tf.cast(ours, tf.float32), theirs, rtol=2**-8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet_20"}, r"network='resnet_20': must be one of .*; did you mean 'resnet20'\?"),
        ({"name": "VGG"}, r"network='VGG': must be one of .*; did you mean 'vgg16'\?"),
        (
            {"image_shape": (32, 32)},
            r"image_shape=\(32, 32\): must be three whole numbers .*image_shape=\(32, 32, 3\)",
        ),
        ({"image_shape": (32, 0, 3)}, r"image_shape=\(32, 0, 3\): must be three whole numbers"),
        ({"num_classes": 0}, "num_classes=0: must be a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as raised:
        build(**{"name": "resnet20"} | arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("depth", "nearest"), [(19, 20), (34, 32), (2, 8), (0, 8)])
def test_other_depths_of_a_resnet_are_refused(depth, nearest):
    with pytest.raises(UserError, match=f"depth={depth}: .*6n \\+ 2.*depth={nearest}"):
        resnet(depth)
