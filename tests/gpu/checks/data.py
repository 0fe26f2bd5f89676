"""Where the input is: sets on the host, the next step's parts on their towers."""

import keras
import numpy as np
import tensorflow as tf

from models.data.image_store import ImageSet, ImageStore
from models.image_task import ImageTask
from models.own_task import OwnTask
from strategies.registry import build_strategy
from tests.gpu.fresh_process import STAND_IN, tower_devices, towers
from tests.gpu.modes import strategy_of
from towers.errors import UserError
from towers.input.placed_batch import parts_of
from towers.options import StepOptions
from towers.updates.rules import SGD
from towers.updates.schedules import Constant

_SET_MIB, _ALLOWED_MIB = 256, 64
_COUNT = (_SET_MIB << 20) // (32 * 32 * 3)


def sets_stay_on_the_host(kind: str) -> None:
    """With a set of 256 MiB, building a strategy, 2 steps and an evaluation use less than 64 MiB of GPU:0."""
    strategy = build_strategy("towers", _TASKS[kind](), towers(), StepOptions(rule=SGD(), schedule=Constant(0.01)))
    strategy.run_steps(2)
    strategy.evaluate(2)
    if not STAND_IN:
        peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
        print(f"{kind}: at most {peak / 2**20:.1f} MiB of GPU:0")
        assert peak < _ALLOWED_MIB << 20


def parts_are_there_before_the_step() -> None:
    """The next step's parts are uint8 on their towers' devices."""
    strategy = strategy_of("central", towers())
    strategy.run_steps(1)
    for part, device in zip(parts_of(strategy._next_batch(strategy.step)), tower_devices(), strict=True):
        images = tf.nest.flatten(part)[0]
        assert images.dtype == tf.uint8
        placed = {tensor.device for tensor in tf.nest.flatten(part)}
        assert all(name.endswith(device.removeprefix("/device:")) for name in placed), placed


def a_label_out_of_range_is_named() -> None:
    """A GPU computes NaN for it; the run ends with one line about the label, as on a CPU."""
    devices = towers(parameters=tower_devices()[0])
    strategy = build_strategy("towers", _own_task(7), devices, StepOptions(rule=SGD(), schedule=Constant(0.01)))
    try:
        strategy.run_steps(1)
    except UserError as error:
        assert "label 7 is out of range" in str(error), error
    else:
        raise AssertionError("no error")


def _image_task() -> ImageTask:
    store = ImageStore(images=_pixels(), labels=np.zeros(_COUNT, np.int64), num_classes=2)
    images = ImageSet(
        name="zeros",
        image_shape=(32, 32, 3),
        num_classes=2,
        num_examples={"train": _COUNT, "eval": _COUNT},
        open_store=lambda split: store,
    )
    return ImageTask(name="zeros", images=images, network="tiny", batch_size=8)


def _own_task(label: int = 0) -> OwnTask:
    def model():
        inputs = keras.Input((32, 32, 3), dtype="uint8")
        return keras.Model(
            inputs, keras.layers.Dense(2)(keras.layers.Flatten()(keras.ops.cast(inputs, "float32")))
        )

    data = (_pixels(), np.full(_COUNT, label, np.int64))
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return OwnTask(model=model, train_data=data, eval_data=data, losses=losses, batch_size=8)


def _pixels() -> np.ndarray:
    return np.zeros((_COUNT, 32, 32, 3), np.uint8)


_TASKS = {"images": _image_task, "own arrays": _own_task}
