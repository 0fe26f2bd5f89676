"""Several steps in one execution of a graph: the same bits, and an error still names its step."""

import dataclasses
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.own_task import OwnTask
from strategies.errors import NonFiniteStep
from strategies.registry import build_strategy
from strategies.steps import execution_length, executions
from strategies.steps.execution_length import ExecutionLength
from tests.strategies.small_task import random_task, small_task
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.user_errors import refused
from towers.devices import Devices
from towers.errors import UserError
from towers.exchange import TowerExchange
from towers.execution import LoopOfSteps, must_be_alone
from towers.options import StepOptions
from towers.updates.rules import Adam
from towers.updates.schedules import Cosine


def strategy(steps, task=None, devices=None, **options):
    options = {"rule": Adam(), "schedule": Cosine(0.01, 30), **options}
    devices = cpus(1) if devices is None else devices
    return build_strategy(
        "towers", task or random_task(), devices, StepOptions(**options), steps_per_execution=steps
    )


def values_of(made) -> np.ndarray:
    found = made.checkpointables()
    kept = [*found["parameters"].values(), *found["state"].values(), *found["counters"].values()]
    return np.concatenate([np.ravel(tf.convert_to_tensor(value).numpy()).astype(np.float64) for value in kept])


def reports(made, *lengths):
    """The reports of some calls, without times."""
    return [dataclasses.replace(made.run_steps(length), seconds=0.0, input_seconds=0.0) for length in lengths]


def as_on_gpus(num_towers: int):
    return dataclasses.replace(cpus(num_towers), masks=True, input_on_towers=True)


DEVICES = {
    "two towers": (cpus(2), {}),
    "synced statistics": (cpus(2), {"batch_stats": "synced"}),
    "compiled as on one GPU": (as_on_gpus(1), {"xla": True}),
    "as on two GPUs": (as_on_gpus(2), {}),
    "sharded": (cpus(2, sharded=True), {}),
    "replicated": (cpus(2, replicated=True), {}),
    "zero=1": (cpus(2, zero=1), {}),
    "zero=3": (cpus(2, zero=3), {}),
    "scaled losses": (cpus(1), {"precision": "float16", "on_nan": "skip"}),
}


@pytest.mark.parametrize("case", first_quick(DEVICES))
def test_the_same_bits_as_one_at_a_time(case):
    """With batch norm, dropout, augmentation, a rate for each step and short last batches."""
    devices, options = DEVICES[case]
    alone, together = (strategy(steps, devices=devices, **options) for steps in (1, 4))
    assert reports(together, 6, 1, 9) == reports(alone, 6, 1, 9)
    np.testing.assert_array_equal(values_of(together), values_of(alone))


def test_a_resumed_run_traces_nothing_anew(monkeypatch):
    traced = []
    monkeypatch.setattr(
        LoopOfSteps, "_next_batch", lambda self, *given: traced.append(0) or next_batch(self, *given)
    )
    alone, together = (strategy(steps, numbers_task([0, 1] * 8)) for steps in (1, 4))
    for made in (alone, together):
        made.run_steps(7)
        made.engine.counters.step.assign(3)
        made.restored()
        made.run_steps(6)
    np.testing.assert_array_equal(values_of(together), values_of(alone))
    assert traced == [0]


next_batch = LoopOfSteps._next_batch


def numbers_task(
    labels,
    *,
    wait_seconds: float = 0.0,
    fails_at: int | None = None,
    fails_once: bool = False,
    readings: int | None = None,
    nan_at: int | None = None,
):
    """Batches of four examples, one batch for each label; the training data come from a user's generator.

    Args:
      labels: labels of the batches, which repeat after the last one.
      wait_seconds: seconds to wait before each batch.
      fails_at: index of the batch that can't be read.
      fails_once: whether that batch can be read the next time.
      readings: how often the generator can be read; None for any number of times.
      nan_at: index of the batch whose features are not finite.
    """
    failures = []
    left = [0] * readings if readings else None

    def generate():
        if left is not None:
            if not left:
                return
            left.pop()
        for index, label in enumerate(labels):
            time.sleep(wait_seconds)
            if index == fails_at and not (fails_once and failures):
                failures.append(index)
                raise RuntimeError("the camera is off")
            number = np.nan if index == nan_at else index
            yield np.full((4, 3), number, np.float32), np.full(4, label, np.int64)

    spec = (tf.TensorSpec((4, 3), tf.float32), tf.TensorSpec(4, tf.int64))
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    return OwnTask(
        model=lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]),
        train_data=data.repeat(),
        losses=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        batch_size=4,
    )


_LABELS = [0] * 7 + [5] + [1] * 8
_OF_LABEL, _OF_GENERATOR = "step 7: label 5 is out of range", "at step 6: RuntimeError: the camera is off"


_MISTAKES = {
    "label": ({"labels": _LABELS}, _OF_LABEL),
    "generator": ({"labels": [0] * 9, "fails_at": 6}, _OF_GENERATOR),
    "generator once": ({"labels": [0] * 9, "fails_at": 6, "fails_once": True}, _OF_GENERATOR),
    "label after NaN": ({"labels": _LABELS, "nan_at": 5}, _OF_LABEL),
}


_PLACES = {"one tower": cpus(1), "two towers": cpus(2), "as on a GPU": as_on_gpus(1)}


# Each mistake and each place once.
_QUICK = {
    ("label after NaN", "one tower"),
    ("generator once", "one tower"),
    ("label", "two towers"),
    ("generator", "as on a GPU"),
}


_TRIED = [
    pytest.param(
        mistake, devices, id=f"{mistake}, {where}", marks=() if (mistake, where) in _QUICK else pytest.mark.full
    )
    for where, devices in _PLACES.items()
    for mistake in _MISTAKES
    # A GPU has no error for a label. On the CPU in its place the counters stop at the step that is not finite.
    if (mistake, where) != ("label after NaN", "as on a GPU")
]


@pytest.mark.parametrize("mistake, devices", _TRIED)
def test_an_error_names_its_step(mistake, devices):
    """The steps before the error are applied and counted, as if they ran one at a time."""
    given, part = _MISTAKES[mistake]
    alone, together = (strategy(steps, numbers_task(**given), devices) for steps in (1, 8))
    messages = []
    for made in (alone, together):
        with pytest.raises(UserError) as caught:
            made.run_steps(20)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert part in messages[0]
    np.testing.assert_array_equal(values_of(together), values_of(alone))


@pytest.mark.parametrize("steps", first_quick([8, 1]))
def test_steps_after_an_error_have_their_own_batches(steps):
    task = numbers_task([0, 1] * 8, fails_at=6, fails_once=True)
    made, expected = strategy(steps, task), strategy(1, numbers_task([0, 1] * 8))
    with refused("the 'train' data failed at step 6"):
        made.run_steps(12)
    made.run_steps(12)
    expected.run_steps(18)
    np.testing.assert_array_equal(values_of(made), values_of(expected))


def test_ctrl_c_loses_no_batch(monkeypatch):
    made, expected = (strategy(1, numbers_task([0, 1] * 8)) for _ in range(2))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(made.engine, "train", interrupted)
        made.run_steps(3)
    made.run_steps(3)
    expected.run_steps(3)
    np.testing.assert_array_equal(values_of(made), values_of(expected))


def interrupted(*_):
    raise KeyboardInterrupt


def test_determinism_that_is_switched_on_later_is_kept(monkeypatch):
    made = strategy(4, numbers_task([0, 1]))
    made.run_steps(3)
    monkeypatch.setattr(executions.config, "is_op_determinism_enabled", lambda: True)
    monkeypatch.setattr(made._executions, "_loop", None)
    assert made.run_steps(5).step == 8
    assert made._executions._loop is None


@pytest.mark.parametrize("steps", first_quick([8, 1]))
def test_no_steps_train_nothing(steps):
    made = strategy(steps)
    assert made.run_steps(0).num_steps == made.step == 0


def noisy() -> keras.Model:
    """A model whose noise, when steps run one at a time, continues one random sequence from step to step."""
    inputs = keras.Input((3,))
    noise = keras.layers.Lambda(lambda values: values + tf.random.normal(tf.shape(values)))
    return keras.Model(inputs, keras.layers.Dense(2)(noise(inputs)))


def test_random_numbers_without_seeds_of_a_step_stay():
    task = dataclasses.replace(numbers_task([0, 1]), model=noisy)
    alone, together = strategy(1, task), strategy(4, task)
    assert reports(together, 6) == reports(alone, 6)
    np.testing.assert_array_equal(values_of(together), values_of(alone))


@pytest.mark.parametrize("steps", first_quick([8, 1]))
def test_data_that_end_are_named(steps):
    with refused("the training data ended at step "):
        strategy(steps, numbers_task([0] * 9, readings=4)).run_steps(60)


def test_no_step_is_applied_after_one_that_is_not_finite():
    task = numbers_task([0] * 16)
    features = tf.data.Dataset.range(16).map(
        lambda index: (
            tf.where(index == 6, np.nan, tf.ones((4, 3))),
            tf.zeros(4, tf.int64),
        )
    )
    task = dataclasses.replace(task, train_data=features.repeat())
    alone, together = strategy(1, task), strategy(5, task)
    for made in (alone, together):
        with pytest.raises(NonFiniteStep, match="step 6 is not finite"):
            made.run_steps(14)
    np.testing.assert_array_equal(values_of(together), values_of(alone))


def test_reports_that_come_late_are_those_of_their_own_calls():
    alone, together = (strategy(steps, numbers_task([0, 1] * 8), as_on_gpus(1)) for steps in (1, 4))
    expected = [dataclasses.replace(alone.run_steps(6), seconds=0.0, input_seconds=0.0) for _ in range(3)]
    found = [together.start_steps(6) for _ in range(3)]
    found = [report for report in [*found, together.settle()] if report is not None]
    assert [dataclasses.replace(report, seconds=0.0, input_seconds=0.0) for report in found] == expected


def test_waiting_for_batches_is_reported():
    """The first batches are read ahead; each of 40 others comes 5 ms after the one before it."""
    made = strategy(8, numbers_task([0, 1], wait_seconds=0.005))
    made.run_steps(9)
    report = made.run_steps(40)
    assert 0.1 < report.input_seconds <= report.seconds


@pytest.mark.parametrize(
    "name, steps, options, parts",
    [
        ("towers", 0, {}, ["steps_per_execution=0", "at least 1"]),
        ("towers", 8, {"accumulation": 2}, ["steps_per_execution=8 with accumulation=2", "omit one"]),
        ("mirrored", 8, {}, ["steps_per_execution=... with strategy 'mirrored'", "only 'towers' can"]),
    ],
)
def test_an_execution_that_can_t_have_several_steps_is_refused(name, steps, options, parts):
    with refused(*parts):
        build_strategy(name, small_task(), cpus(2), StepOptions(**options), steps_per_execution=steps)


def test_gpus_that_exchange_statistics_have_one():
    gpus = Devices(towers=("/device:GPU:0", "/device:GPU:1"), parameters="/device:GPU:0")
    with refused("steps_per_execution=8 with batch_stats='synced'", "omit one"):
        build_strategy("towers", small_task(), gpus, StepOptions(batch_stats="synced"), steps_per_execution=8)


def test_collectives_are_found_wherever_they_are():
    """For example those of a batch norm in a branch of a model: repeated in a graph they would fail."""
    exchange = TowerExchange(2)

    @tf.function(input_signature=[tf.TensorSpec([])])
    def in_a_branch(x):
        return tf.cond(x > 0, lambda: exchange.sum(x), lambda: x)

    @tf.function(input_signature=[tf.TensorSpec([])])
    def without(x):
        return tf.cond(x > 0, lambda: 2 * x, lambda: x)

    assert must_be_alone(in_a_branch.get_concrete_function().graph)
    assert not must_be_alone(without.get_concrete_function().graph)


def test_one_step_at_a_time_is_always_possible():
    made = build_strategy("towers", small_task(), cpus(2), StepOptions(accumulation=2), steps_per_execution=1)
    assert made.run_steps(2).num_steps == 2


class TestTheLengthOfAnExecution:
    def test_short_steps_are_joined_once_there_were_many(self):
        length, found = ExecutionLength(None), []
        for _ in range(3):
            length.note(1000, 0.5)
            found.append(length.steps)
        assert found == [1, 200, 200]

    def test_long_steps_run_alone(self):
        length = ExecutionLength(None)
        for seconds in (100.0, 50.0, 10.0):
            length.note(2000, seconds)
        assert length.steps == 1

    def test_steps_that_become_long_run_alone_again(self):
        length = ExecutionLength(None)
        length.note(2000, 2.0)
        assert length.steps == 100
        length.note(10, 1.0)
        assert length.steps == 1

    def test_a_given_number_stays(self):
        length = ExecutionLength(8)
        length.note(1000, 100.0)
        assert length.steps == 8

    def test_a_run_of_short_steps_joins_them_by_itself(self, monkeypatch):
        # On a busy machine a first step takes more than ten seconds.
        monkeypatch.setattr(execution_length, "_SHORT_SECONDS", 1e6)
        monkeypatch.setattr(execution_length, "_FIRST_STEPS", 1)
        monkeypatch.setattr(execution_length, "_EXECUTION_SECONDS", 1e9)
        alone, together = (strategy(steps, numbers_task([0, 1] * 8)) for steps in (1, None))
        assert reports(together, 1, 5) == reports(alone, 1, 5)
        assert together._executions._loop is not None
