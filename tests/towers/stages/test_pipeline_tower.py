"""Towers of several devices: what they compute, where, and in which order."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from models.data.drawn_text import DrawnText
from models.networks.transformer import TransformerSize
from models.text_task import TextTask
from strategies.pipeline import pipeline_strategy
from strategies.registry import build_strategy
from strategies.towers import towers_strategy
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.tiny_tasks import (
    NUM_CLASSES,
    TinyTask,
    assert_close,
    dense_task,
    parameters_of,
    stacked,
    vectors,
)
from tests.towers.user_errors import refused
from towers.grid import Grid
from towers.options import StepOptions
from towers.pipeline.schedule_csv import read
from towers.stages.options import PipelineOptions
from towers.task import Batch
from towers.updates.rules import Adam, Momentum
from towers.updates.schedules import Constant

MICROBATCHES = 4


def awkward_task() -> TinyTask:
    """A mask, a tensor that skips stages, a shared layer, a nested model, dropout and a regularizer."""

    def nested() -> keras.Model:
        inputs = layers.Input((5, 6))
        return keras.Model(inputs, layers.Dense(6, "gelu", name="inner")(inputs), name="nested")

    def build():
        words = layers.Input((5,), dtype="int32")
        shared = layers.Dense(6, name="shared")
        embedded = layers.Embedding(12, 6, mask_zero=True, name="table")(words)
        outputs = shared(layers.Dropout(0.3, name="dropped")(embedded))
        outputs = layers.Add(name="skipped")([nested()(outputs), shared(outputs), embedded])
        outputs = layers.GlobalAveragePooling1D(name="masked_mean")(outputs)
        regularizer = keras.regularizers.L2(0.1)
        return keras.Model(
            words, layers.Dense(NUM_CLASSES, kernel_regularizer=regularizer, name="logits")(outputs)
        )

    words = np.random.default_rng(0).integers(0, 12, (9, 5)).astype(np.int32)
    words[:, 0] = 1
    return TinyTask(build=build, examples=Batch(words, vectors(9).labels))


def trained(make, task, rule=None, **options):
    rule = rule or Momentum(momentum=0.9)
    options = StepOptions(rule=rule, schedule=Constant(0.05), precision="float64", **options)
    strategy = make(task, options)
    strategy.run_steps(3)
    return strategy


def state_of(strategy):
    return {name: variable.numpy() for name, variable in strategy.checkpointables()["state"].items()}


def reference(task, rule=None, microbatches=MICROBATCHES, num_towers=1):
    def make(task, options):
        return towers_strategy(task, cpus(num_towers), options)

    return trained(make, task, rule, accumulation=microbatches)


@functools.cache
def awkward_reference() -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The parameters and the evaluation of one device."""
    expected = reference(awkward_task())
    return parameters_of(expected), expected.evaluate()


def pipeline(task, num_devices, rule=None, num_towers=1, **options):
    devices = cpus(num_devices * num_towers)
    devices = devices.grouped(Grid(data=num_towers, stage=num_devices).groups(devices.towers))
    options = PipelineOptions(**{"microbatches": MICROBATCHES, **options})
    return trained(lambda task, step: pipeline_strategy(task, devices, step, pipeline=options), task, rule)


@pytest.mark.full
@pytest.mark.parametrize(
    "num_devices, options",
    [(3, {"schedule": "zb_h1"}), (2, {"stages": 4, "schedule": "interleaved"}), (1, {})],
    ids=str,
)
def test_every_kind_of_model_graph(num_devices, options):
    """Nine examples in four microbatches; dropout's masks too are those of one device."""
    found, (parameters, evaluation) = pipeline(awkward_task(), num_devices, **options), awkward_reference()
    assert_close(parameters_of(found), parameters)
    assert found.evaluate() == pytest.approx(evaluation)


def recurrent_task() -> TinyTask:
    """A task with loops, whose gradients read lists, behind a layer with constants."""

    def build():
        sequences = layers.Input((5, 3))
        outputs = layers.Normalization(mean=[0.1, 0.2, 0.3], variance=[1.0, 2.0, 3.0], name="normal")(sequences)
        outputs = layers.LSTM(4, return_sequences=True, name="one")(outputs)
        outputs = layers.Bidirectional(layers.GRU(3, name="cell"), name="two")(outputs)
        return keras.Model(sequences, layers.Dense(NUM_CLASSES, name="logits")(outputs))

    sequences = np.random.default_rng(0).normal(size=(9, 5, 3)).astype(np.float32)
    return TinyTask(build=build, examples=Batch(sequences, vectors(9).labels))


@pytest.mark.full
def test_recurrent_layers_and_constants():
    """With gathered parameters: stages have parts of them, and loops."""

    def make(task, options):
        pipeline = PipelineOptions(microbatches=2)
        return pipeline_strategy(task, cpus_in_groups("data:2,stage:2", zero=3), options, pipeline=pipeline)

    found, expected = trained(make, recurrent_task()), reference(recurrent_task(), microbatches=2)
    assert_close(parameters_of(found), parameters_of(expected))


class MappedDense(layers.Dense):
    """Computes one example after another, so that its loop's lists are as long as the batch."""

    def call(self, inputs):
        return tf.map_fn(lambda one: super(MappedDense, self).call(one[None])[0], inputs)


@pytest.mark.full
def test_loops_over_the_examples():
    def build():
        hidden = MappedDense(6, "tanh", name="first")
        return stacked((4,), hidden, MappedDense(5, name="second"), layers.Dense(NUM_CLASSES, name="logits"))

    task = TinyTask(build=build, examples=vectors(9))
    found, expected = pipeline(task, 2, microbatches=2), reference(task, microbatches=2)
    assert_close(parameters_of(found), parameters_of(expected))


class Positive(layers.Layer):
    """The positive numbers, as a sparse tensor."""

    def call(self, inputs):
        return tf.sparse.from_dense(tf.nn.relu(inputs))

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype, sparse=True)


@pytest.mark.full
def test_a_sparse_tensor_between_stages():
    """The tensor has a gradient in the stage that computed it."""

    def build():
        first, second = layers.Dense(6, name="first"), layers.Dense(5, name="second")
        return stacked((4,), first, Positive(name="positive"), second, layers.Dense(NUM_CLASSES, name="logits"))

    task = TinyTask(build=build, examples=vectors(9))
    found, expected = pipeline(task, 2, microbatches=2, balance=(2, 2)), reference(task, microbatches=2)
    assert_close(parameters_of(found), parameters_of(expected))


@pytest.mark.full
def test_two_pipelines_divide_each_microbatch():
    text = DrawnText(num_tokens=10, length=6, num_train=16, num_eval=8)
    task = TextTask(text=text, size=TransformerSize(blocks=1, width=8, heads=2), batch_size=8, dropout=0.1)
    found = pipeline(task, 2, Adam(weight_decay=0.1), num_towers=2, microbatches=2)
    expected = reference(task, Adam(weight_decay=0.1), microbatches=2, num_towers=2)
    assert_close(parameters_of(found), parameters_of(expected))


@pytest.mark.full
def test_stages_of_equal_time():
    """The measurement changes no variable of the model, whatever its operations are."""
    found = pipeline(awkward_task(), 2, balance="time")
    assert_close(parameters_of(found), awkward_reference()[0])


@pytest.mark.full
def test_a_schedule_from_a_file_may_take_microbatches_in_any_order():
    schedule = read("F1,F0,B1,B0\nF1,B1,F0,B0\n", "own.csv")
    found = pipeline(dense_task(9), 2, schedule=schedule, microbatches=2, balance=(1, 1))
    assert_close(parameters_of(found), parameters_of(reference(dense_task(9), microbatches=2)))


@pytest.mark.full
def test_towers_share_moving_statistics_as_if_after_each_microbatch():
    """Nine examples in two microbatches, the second one first; a batch norm called twice, another one frozen."""

    def build():
        inputs, norm = layers.Input((4,)), layers.BatchNormalization(momentum=0.8, name="norm")
        outputs = norm(layers.Activation("tanh", name="between")(norm(inputs)))
        outputs = layers.BatchNormalization(trainable=False, name="frozen")(outputs)
        return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(outputs))

    task = TinyTask(build=build, examples=vectors(9))
    schedule = read("F1,F0,B1,B0\nF1,B1,F0,B0\n", "own.csv")
    found = pipeline(task, 2, num_towers=2, schedule=schedule, microbatches=2, balance=(4, 1))
    expected = reference(task, microbatches=2, num_towers=2)
    for of_run in (parameters_of, state_of):
        assert_close(of_run(found), of_run(expected), 1e-12)


@pytest.mark.full
def test_microbatches_of_several_calls_are_cut_as_on_one_device():
    """13 examples in 8 microbatches are 2, 2, 1, 2, ...; 7 and 6 examples in 4 each would be 2, 2, 2, 1, ..."""

    def build():
        inputs = layers.Input((4,))
        outputs = layers.BatchNormalization(name="norm")(inputs)
        return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(outputs))

    task, options = TinyTask(build=build, examples=vectors(13)), PipelineOptions(microbatches=4)

    def make(task, step):
        return pipeline_strategy(task, cpus_in_groups("stage:2"), step, pipeline=options)

    found, expected = trained(make, task, accumulation=2), reference(task, microbatches=8)
    for of_run in (parameters_of, state_of):
        assert_close(of_run(found), of_run(expected), 1e-12)


def test_parameters_and_slots_are_on_the_devices_of_their_stages():
    options = StepOptions(rule=Adam(), schedule=Constant(0.1))
    pipeline = PipelineOptions(balance=(1, 1), microbatches=2)
    strategy = build_strategy("pipeline", dense_task(), cpus(2), options, pipeline=pipeline)
    found = {
        variable.device[-5:]
        for kind in (strategy.engine.parameters(), *strategy.engine.slots().values())
        for name, variable in kind.items()
        if name.startswith("logits/")
    }
    assert found == {"CPU:1"}
    lines = "\n".join(strategy.notices)
    assert "stage 1 on CPU:1: 1 operation, logits; 72 bytes of parameters" in lines
    assert "device 1" in lines


def test_what_pipelines_refuse():
    with refused("batch_stats='synced' with a pipeline of 2 towers"):
        devices = cpus(4).grouped(Grid(data=2, stage=2).groups(cpus(4).towers))
        options = StepOptions(batch_stats="synced")
        build_strategy("pipeline", dense_task(), devices, options, pipeline=PipelineOptions(microbatches=2))
    with refused("a grid with strategy 'towers'"):
        build_strategy("towers", dense_task(), devices, StepOptions())
    with refused("microbatches=16, num_towers=1 and a batch of 8"):
        build_strategy("pipeline", dense_task(), cpus(2), StepOptions(), pipeline=PipelineOptions(microbatches=16))
