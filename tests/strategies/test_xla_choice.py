"""When XLA compiles by default: on one GPU, if it can compile the model."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from models.clicks_task import ClicksTask
from models.data.drawn_clicks import DrawnClicks
from models.data.drawn_text import DrawnText
from models.networks.transformer import TransformerSize
from models.own_task import OwnTask
from models.text_task import TextTask
from strategies.towers import towers_strategy
from tests.strategies.small_task import small_task
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.user_errors import refused
from towers import xla_choice
from towers.devices import Devices
from towers.input.tower_parts import open_length
from towers.input.unprepared import read_dataset
from towers.options import StepOptions
from towers.task import InputShard

GPU = Devices(towers=("/device:GPU:0",), parameters="/device:GPU:0", input_on_towers=True)
TEXT = TextTask(
    text=DrawnText(num_tokens=9, length=6),
    size=TransformerSize(blocks=1, width=8, heads=2),
    batch_size=4,
)


@pytest.fixture(autouse=True)
def works_without_a_gpu(monkeypatch):
    monkeypatch.setattr(xla_choice, "_works_on", lambda device: True)


def choice(task, devices=GPU, spec=None, **options) -> xla_choice.XlaChoice:
    dataset = read_dataset(task, "train", InputShard(), unprepared=devices.input_on_towers)
    spec = open_length(dataset.element_spec) if spec is None else spec
    return xla_choice.xla_choice(task, task.build_model(), devices, StepOptions(**options), spec)


def chosen(task, devices=GPU, spec=None, **options) -> bool:
    return choice(task, devices, spec, **options).compiles


def own_task(layer, shape=(5, 3)) -> OwnTask:
    def model():
        rest = [layers.Dense(3), layer(), layers.GlobalMaxPooling1D(), layers.Dense(2)]
        return keras.Sequential([layers.Input(shape), *rest])

    data = (np.zeros((8, 5, 3), np.float32), np.zeros(8, np.int64))
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return OwnTask(model=model, train_data=data, losses=losses, batch_size=4)


class Computed(layers.Layer):
    """A layer that computes a given function."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def call(self, inputs):
        return tf.ensure_shape(self._function(inputs), inputs.shape)

    def compute_output_shape(self, shape):
        return shape


def as_text(inputs):
    return inputs * tf.cast(tf.strings.length(tf.strings.as_string(inputs)), inputs.dtype)


def until_large(inputs):
    """A loop whose backward pass needs a value of each iteration, of which the number is unknown."""
    (found,) = tf.while_loop(lambda x: tf.reduce_sum(x * x) < 1e4, lambda x: [x * 1.5 + 1], [inputs])
    return found


def as_many_as_a_value_says(inputs):
    return inputs + tf.cast(tf.size(tf.range(tf.cast(inputs[0, 0, 0], tf.int32))), inputs.dtype)


def rounded(inputs):
    """An operation for which XLA has a kernel, but none for its gradient."""
    return tf.quantization.quantize_and_dequantize_v2(inputs, -1.0, 1.0)


def of_unknown_length(inputs):
    return inputs * tf.reduce_sum(tf.boolean_mask(inputs, inputs > 0))


@pytest.mark.parametrize(
    "task", first_quick([small_task(augment=True, batch_norm=True), TEXT]), ids=["images", "text"]
)
def test_one_gpu_compiles(task):
    assert chosen(task)


@pytest.mark.parametrize(
    "devices",
    [
        {"towers": ("/device:GPU:0", "/device:GPU:1")},
        {"towers": ("/device:CPU:0",), "input_on_towers": False},
        {"deterministic": True},
        {"zero": 3},
    ],
    ids=str,
)
def test_other_devices_do_not(devices):
    assert not chosen(small_task(), dataclasses.replace(GPU, **devices))


@pytest.mark.parametrize(
    "function, why",
    [
        (rounded, "it has no kernel for QuantizeAndDequantizeV4Grad"),
        (as_text, "it has no kernel for AsString"),
        (until_large, "XLA compilation requires a fixed tensor list size"),
        (as_many_as_a_value_says, "must be a compile-time constant"),
        (of_unknown_length, "Where has results of unknown lengths"),
    ],
)
def test_a_model_that_xla_can_not_compile(function, why):
    """It can't compile the forward or the backward pass, because of operations or of shapes."""
    found = choice(own_task(lambda: Computed(function)))
    assert not found.compiles
    assert why in found.why_not


@pytest.mark.parametrize(
    "masks, function, why",
    first_quick(
        [
            (False, rounded, "no kernel for QuantizeAndDequantizeV4Grad"),
            (True, until_large, "a fixed tensor list size"),
            (False, until_large, "a fixed tensor list size"),
            (True, rounded, "no kernel for QuantizeAndDequantizeV4Grad"),
        ],
        2,
    ),
    ids=["tower, operation", "step, shape", "tower, shape", "step, operation"],
)
def test_asked_for_it_says_so_in_one_line(masks, function, why):
    """XLA compiles the tower, or with masks the whole step."""
    devices = dataclasses.replace(cpus(1), masks=masks)
    strategy = towers_strategy(own_task(lambda: Computed(function)), devices, StepOptions(xla=True))
    with refused("xla=True: XLA can't compile the model's training pass", why, "use xla=False"):
        strategy.run_steps(1)


def test_a_function_that_xla_knows():
    assert chosen(own_task(lambda: Computed(tf.nn.relu)))


def test_batches_of_many_lengths_would_be_compiled_many_times():
    task = own_task(layers.ReLU, shape=(None, 3))
    spec = open_length(task.dataset("train", InputShard()).element_spec)
    assert chosen(task, spec=spec)
    assert not chosen(task, spec=spec._replace(features=tf.TensorSpec([None, None, 3])))


def cut_noise(inputs):
    return inputs + tf.random.stateless_truncated_normal(tf.shape(inputs), [1, 2])


def test_random_numbers_stay_those_of_other_modes():
    """XLA draws dropout's masks as TensorFlow does, but not every kind of random numbers."""
    assert chosen(small_task(dropout=0.1))
    assert (
        "other random numbers in StatelessTruncatedNormalV2"
        in choice(own_task(lambda: Computed(cut_noise))).why_not
    )


def test_rows_of_large_tables_are_read_as_rows():
    """XLA would read and update the whole table in each step."""
    small, large = (
        ClicksTask(clicks=DrawnClicks(num_tables=2, num_rows=rows), batch_size=8) for rows in (9, 99_999)
    )
    assert chosen(small)
    assert not chosen(large)


def test_recomputation_is_not_for_xla():
    assert not chosen(small_task(), recompute="full")


def test_a_gpu_for_which_xla_lacks_files_of_cuda(monkeypatch):
    monkeypatch.undo()

    def fails(*arguments):
        raise tf.errors.InternalError(None, None, "libdevice not found at ./libdevice.10.bc")

    monkeypatch.setattr(tf, "exp", fails)
    assert not chosen(small_task())
