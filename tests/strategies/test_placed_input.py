"""Input on the towers' devices: the same numbers, parts placed before the step, what stays on the host."""

import dataclasses
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.clicks_task import ClicksTask
from models.data.drawn_clicks import DrawnClicks
from models.data.drawn_text import DrawnText
from models.networks.transformer import TransformerSize
from models.own_task import OwnTask
from models.text_task import TextTask
from strategies.registry import build_strategy
from tests.strategies.small_task import random_task, small_task
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.partitioned_graphs import recorded_graphs
from towers import one_process_engine
from towers.input.device_iterator import device_iterator
from towers.input.placed_batch import parts_of
from towers.input.placed_input import PlacedInput
from towers.input.tower_parts import TowerParts
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.task import Batch
from towers.updates.rules import Momentum
from towers.updates.schedules import Constant


def strategy(name="towers", num_towers=2, *, on_towers, task=None, accumulation=1, **spread):
    """A strategy that reads its input as with GPUs, or as with CPUs."""
    devices = dataclasses.replace(cpus(num_towers, **spread), input_on_towers=on_towers)
    options = StepOptions(rule=Momentum(), schedule=Constant(0.05), accumulation=accumulation)
    given = {"pipeline": PipelineOptions(microbatches=2)} if name == "pipeline" else {}
    return build_strategy(name, task or random_task(), devices, options, **given)


def trained(made):
    """Loss, evaluation and parameters of 7 steps; the fifth one's batch is short."""
    report = made.run_steps(7)
    values = [tf.convert_to_tensor(value).numpy() for value in made.checkpointables()["parameters"].values()]
    return report.loss, report.examples, made.evaluate(), np.concatenate([value.ravel() for value in values])


@pytest.mark.parametrize(
    "name, num_towers, accumulation, spread",
    first_quick(
        [
            ("towers", 2, 2, {}),
            ("towers", 1, 1, {}),
            ("towers", 2, 1, {"zero": 3}),
            ("mirrored", 2, 1, {}),
            ("ring", 2, 2, {}),
            ("pipeline", 2, 2, {}),
            ("slices", 2, 1, {}),
        ],
        num_quick=1,
    ),
)
def test_the_same_bits_as_from_the_host(name, num_towers, accumulation, spread):
    """With batch norm, dropout, augmentation and a short last batch."""
    arguments = {"accumulation": accumulation, **spread}
    if name == "slices":
        arguments["task"] = small_task(augment=True)
    expected, found = (
        trained(strategy(name, num_towers, on_towers=on_towers, **arguments)) for on_towers in (False, True)
    )
    assert found[:3] == expected[:3]
    np.testing.assert_array_equal(found[3], expected[3])


TEXT = TextTask(
    text=DrawnText(num_tokens=9, length=6, num_train=53, num_eval=23),
    size=TransformerSize(blocks=1, width=8, heads=2),
    batch_size=10,
    dropout=0.2,
)
CLICKS = ClicksTask(clicks=DrawnClicks(num_tables=2, num_rows=10, num_train=53, num_eval=23), batch_size=10)


@pytest.mark.full
@pytest.mark.parametrize(
    "task, name, spread",
    [(TEXT, "pipeline", {}), (CLICKS, "towers", {"sharded": True})],
)
def test_ids_and_labels_of_32_bits_give_the_same_bits(task, name, spread):
    expected, found = (
        trained(strategy(name, on_towers=on_towers, task=task, **spread)) for on_towers in (False, True)
    )
    assert found[:3] == expected[:3]
    np.testing.assert_array_equal(found[3], expected[3])


@pytest.mark.full
def test_large_tables_are_read_by_rows_with_the_same_bits(monkeypatch):
    monkeypatch.setattr(one_process_engine, "_LARGE_TABLE_BYTES", 0)
    expected, found = (strategy(on_towers=on_towers, task=CLICKS) for on_towers in (False, True))
    assert found.engine._lookups.heights
    for one, other in zip(trained(expected), trained(found), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int16])
def test_integers_arrive_in_a_dtype_that_gpus_keep_and_the_tower_gives_back_their_own(dtype):
    """TensorFlow keeps function arguments on a GPU, except int32."""
    seen = set()

    class Ids(keras.layers.Layer):
        def call(self, inputs):
            seen.add(("features", inputs.dtype))
            return keras.ops.cast(inputs, "float32")

    def model():
        inputs = keras.Input((2,), dtype=np.dtype(dtype).name)
        return keras.Model(inputs, keras.layers.Dense(2, name="logits")(Ids()(inputs)))

    class NotedTask(OwnTask):
        def loss(self, outputs, batch):
            seen.add(("labels", batch.labels.dtype))
            return super().loss(outputs, batch)

    data = np.arange(16).reshape(8, 2).astype(dtype), (np.arange(8) % 2).astype(dtype)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = NotedTask(model=model, train_data=data, losses=losses, batch_size=8)
    made = strategy(on_towers=True, task=task)
    sent = {tensor.dtype for tensor in tf.nest.flatten(parts_of(made._next_batch(0)))}
    assert sent == {tf.int64 if dtype == np.int32 else tf.as_dtype(dtype)}
    seen.clear()
    made.restored()
    made.run_steps(1)
    assert seen == {("features", tf.as_dtype(dtype)), ("labels", tf.as_dtype(dtype))}


def test_parts_are_uint8_on_their_towers_before_the_step():
    made = strategy(on_towers=True, task=small_task(augment=True))
    made.run_steps(1)
    placed = made._next_batch(made.step)
    for part, device in zip(parts_of(placed), ("CPU:0", "CPU:1"), strict=True):
        tensors = tf.nest.flatten(part)
        assert {tensor.device.rpartition("device:")[2] for tensor in tensors} == {device}
        assert tensors[0].dtype == tf.uint8 and not any(tensor.dtype == tf.float32 for tensor in tensors)


def test_nothing_tunes_the_iterators_of_devices():
    """Otherwise the deletion of these iterators would wait for their tuning threads, for seconds."""
    batches = tf.data.Dataset.from_tensors(tf.zeros([4])).repeat()
    own = device_iterator(batches, cpus(2).towers, ahead=1)
    assert [one.device.rpartition("device:")[2] for one in next(own)] == ["CPU:0", "CPU:1"]
    assert [of_device._dataset.options().autotune.enabled for of_device in own._device_iterators] == [False, False]


@pytest.mark.full
def test_a_step_sends_no_input():
    """Only scalars, the parameters and what depends on them cross devices within a step."""
    sent = {}
    for on_towers in (False, True):
        made = strategy(on_towers=on_towers, task=small_task(augment=True), parameters=2)
        with recorded_graphs() as graphs:
            made.run_steps(1)
        kinds = (tf.uint8.as_datatype_enum, tf.int64.as_datatype_enum)
        sends = [node for node in graphs.nodes if node.op == "_Send" and node.attr["T"].type in kinds]
        sent[on_towers] = len([node for node in sends if "CPU:1" in node.attr["recv_device"].s.decode()])
    assert sent[True] == 0 < sent[False]


def placed_on_two(batches: tf.data.Dataset, **given):
    parts = TowerParts.of_one_process(2)
    return PlacedInput(parts=parts, devices=cpus(2).towers, **given).batches(batches)


def test_microbatches_know_their_examples_and_idle_towers():
    """Three examples in two microbatches on two towers: in the second one tower 1 is idle, with an example."""
    batch = Batch(tf.constant([7, 8, 9]))
    for divided in ({"microbatches": 2}, {"accumulation": 2}):
        found = next(placed_on_two(tf.data.Dataset.from_tensors(batch), **divided))
        assert [int(one.examples) for one in found] == [2, 1]
        assert [[float(activity) for activity in one.activities] for one in found] == [[1.0, 1.0], [1.0, 0.0]]
        assert [[part.features.numpy() for part in one.parts] for one in found] == [[[7], [8]], [[9], [9]]]


@pytest.mark.full
def test_microbatches_of_several_calls_are_cut_at_once():
    batch = Batch(tf.range(13))
    found = next(placed_on_two(tf.data.Dataset.from_tensors(batch), accumulation=2, microbatches=4))
    assert [[int(one.examples) for one in of_call] for of_call in found] == [[2, 2, 1, 2], [2, 1, 2, 1]]


def test_the_next_batch_is_read_before_it_is_asked_for_and_few_more_are():
    """Each batch takes memory: TensorFlow reads five ahead if a part waits on each device, three if none does."""
    read = []
    numbers = tf.data.Dataset.range(1000).map(lambda index: tf.numpy_function(_noted(read), [index], tf.int64))
    batches = numbers.map(lambda number: Batch(tf.fill([4], number)))
    asked_for = placed_on_two(batches)
    next(asked_for)
    deadline, seen = time.monotonic() + 30, 0
    while len(read) < 6 or len(read) > seen:
        assert time.monotonic() < deadline, f"{len(read)} batches were read"
        seen = len(read)
        time.sleep(0.3)
    assert len(read) <= 7


def _noted(read: list):
    def note(index):
        read.append(int(index))
        return index

    return note


def test_a_resumed_stream_drops_what_was_read_ahead():
    made = strategy(on_towers=True, task=small_task(augment=True))
    made._next_batch(0)
    second = made._next_batch(1)
    made.engine.counters.step.assign(1)
    made.restored()
    for one, other in zip(tf.nest.flatten(made._next_batch(1)), tf.nest.flatten(second), strict=True):
        np.testing.assert_array_equal(one, other)


def test_texts_stay_on_the_host():
    """No device but the host's has strings."""

    def model():
        lookup = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
        inputs = keras.Input((), dtype="string")
        return keras.Model(inputs, keras.layers.Dense(2)(lookup(inputs)))

    data = (np.array(["a", "b"] * 8), np.array([0, 1] * 8))
    task = OwnTask(
        model=model,
        train_data=data,
        losses=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        batch_size=8,
    )
    made = strategy(on_towers=True, task=task)
    assert made.engine.placed_input is None
    assert np.isfinite(made.run_steps(2).loss)
