"""A run's settings as plain values: every kind of setting, and which changes are seen."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.own_task import OwnTask
from strategies.run_settings import changes, check_same, common_settings, plain_settings
from tests.strategies.small_task import small_task
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.updates.rules import SGD, Momentum
from towers.updates.schedules import Constant, WarmUp

X = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


def task(**fields):
    plain = {
        "model": lambda: None,
        "train_data": (X, Y),
        "losses": keras.losses.MeanSquaredError(),
        "batch_size": 5,
    }
    return OwnTask(**plain | fields)


def seen(before, now):
    """The changes from one value to another, after both went through JSON as in a checkpoint."""
    found = json.loads(json.dumps(plain_settings({"it": before}), allow_nan=False))
    return changes(found, plain_settings({"it": now}))


@pytest.mark.parametrize(
    "before, now, change",
    [
        (1, 2, "it was 1, is 2"),
        (float("nan"), 1.0, "it was nan, is 1.0"),
        (np.float64(0.5), 0.25, "it was 0.5, is 0.25"),
        (Constant(0.1), Constant(0.2), "it was 0.1, is 0.2"),
        (WarmUp(Constant(0.1), 5), WarmUp(Constant(0.1), 6), "it.steps was 5, is 6"),
        (keras.losses.Huber(0.5), keras.losses.Huber(0.25), "'delta': 0.25"),
        ((X, Y), (X, 1 - Y), "it.1 was int64 [50] with checksum"),
        (np.array(["a", "b"], object), np.array(["a", "c"], object), "it was object [2] with checksum"),
        (task(), task(train_data=(X + 1, Y)), "it.train_data.0 was float32 [50, 3] with checksum"),
        (task(), task(eval_data=(X, Y)), "it.eval_data was None, is 2 values"),
        (tf.data.Dataset.range(5).batch(2), tf.data.Dataset.range(9).batch(2), "a dataset of 5 batches"),
    ],
)
def test_changes_are_seen(before, now, change):
    assert seen(before, before) == []
    found = seen(before, now)
    assert any(change in line for line in found), found


def test_settings_of_keras_are_seen():
    def options(optimizer):
        return StepOptions.of_keras(optimizer)

    decay = keras.optimizers.schedules.ExponentialDecay
    slow, fast = (options(keras.optimizers.SGD(decay(0.1, 10, rate))) for rate in (0.9, 0.5))
    assert seen(slow, slow) == []
    assert "'decay_rate': 0.5" in seen(slow, fast)[0]
    assert seen(options(keras.optimizers.SGD(0.1)), options(keras.optimizers.Adam(0.1))) == [
        "it.rule was SGD, is Adam"
    ]


def test_a_large_array_is_described_fast():
    large = np.zeros((200_000, 1_000), np.uint8)
    assert seen((large,), (large[:-1],)) == [
        f"it.0 was {plain_settings({'it': large})['it']}, is {plain_settings({'it': large[:-1]})['it']}"
    ]


class TestTheSameInAllProcesses:
    def test_the_first_difference_is_named(self):
        same = {"batch_size": 8, "optimizer.momentum": 0.9}
        check_same({"worker:0": same, "worker:1": dict(same)})
        message = "worker:2 was started with optimizer.momentum=0.5, and worker:0 with optimizer.momentum=0.9"
        with refused(message, "start all processes with the same settings"):
            check_same({"worker:0": same, "worker:1": same, "worker:2": same | {"optimizer.momentum": 0.5}})

    def test_a_cause_is_named_before_what_follows_from_it(self):
        """Another network has other parameters; another optimizer has another default learning rate."""
        small, large = (
            common_settings(
                small_task(network=network),
                StepOptions(rule=rule, schedule=Constant(rate)),
                evaluates=True,
                shapes={"kernel": (width,)},
            )
            for network, rule, rate, width in (("tiny", SGD(), 0.1, 1), ("resnet20", Momentum(), 0.2, 2))
        )
        with refused("worker:1 was started with network=resnet20, and worker:0 with network=tiny"):
            check_same({"worker:0": small, "worker:1": large})
        assert list(small).index("optimizer") < list(small).index("learning_rate")

    def test_a_list_is_named_by_its_elements(self):
        found = {name: plain_settings({"shares": shares}) for name, shares in (("a:0", None), ("a:1", (2.0, 1.0)))}
        with refused("a:1 was started with shares=2.0,1.0, and a:0 with shares=None"):
            check_same(found)

    def test_a_setting_that_one_process_lacks(self):
        with refused("worker:1 was started with width=3, and worker:0 with width=None"):
            check_same({"worker:0": {}, "worker:1": {"width": 3}})

    def test_paths_and_threads_are_no_settings_of_the_run(self):
        @dataclasses.dataclass
        class Index:
            paths: tuple
            records: int = 5

        @dataclasses.dataclass
        class Task:
            index: Index
            width: int = 3
            batch_size: int = 8
            num_input_threads: int = 2

            def num_examples(self, split):
                return 100

        here, there = Task(Index(("/a/x",))), Task(Index(("/b/x",)), num_input_threads=9)
        options = StepOptions()
        found = common_settings(here, options, evaluates=True)
        assert found == common_settings(there, options, evaluates=True)
        assert (found["width"], found["batch_size"], found["learning_rate"]) == (3, 8, 0.1)
