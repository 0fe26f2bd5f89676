"""Sliced towers: where they compute, what they exchange, and layers used in every way."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

from strategies.slices import slices_strategy
from strategies.towers import towers_strategy
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, assert_close, parameters_of, stacked, vectors
from towers.options import StepOptions
from towers.slices.layout import Layout
from towers.task import Batch
from towers.updates.rules import SGD, Adam
from towers.updates.schedules import Constant

WORDS = np.random.default_rng(0).integers(0, 12, (6, 4)).astype(np.int32)


def words_task(build) -> TinyTask:
    return TinyTask(build=build, examples=Batch(WORDS, vectors(6).labels))


def pair() -> TinyTask:
    def build():
        hidden, logits = layers.Dense(8, "relu", name="hidden"), layers.Dense(NUM_CLASSES, name="logits")
        return stacked((4,), hidden, logits)

    return TinyTask(build=build, examples=vectors(8))


def test_each_device_computes_its_slices_and_only_sums_travel():
    strategy = slices_strategy(pair(), cpus_in_groups("slice:2"), StepOptions())
    with recorded_graphs() as graphs:
        strategy.run_steps(1)
    # Forward one for each layer; backward two for the second layer and one for the first, whose inputs are data.
    assert graphs.devices_of("MatMul") == {"CPU:0": 5, "CPU:1": 5}
    assert graphs.devices_of("ReluGrad") == {"CPU:0": 1, "CPU:1": 1}
    assert graphs.devices_of("Concat") == {}, "nobody reads the whole of a parameter or of the hidden layer"
    for source, target in (("CPU:0", "CPU:1"), ("CPU:1", "CPU:0")):
        assert graphs.copies(source, target) == {}, "parameters stay where they are"
    for part in strategy.engine.placement.parts:
        assert part.variable.device.endswith(part.device)
        assert part.shard.dimension is None or part.device == f"/device:CPU:{part.shard.owner}"


def attending() -> keras.Model:
    """Attention with biases, a gate, a mask and scores; an embedding untied from its projection."""
    words = layers.Input((4,), dtype="int32")
    table = layers.ReversibleEmbedding(12, 6, tie_weights=False, logit_soft_cap=5.0, name="table")
    masked = layers.Embedding(12, 6, mask_zero=True, name="masked")(words)
    attention = layers.MultiHeadAttention(3, 4, use_gate=True, name="attention")
    outputs, scores = attention(masked, table(words), return_attention_scores=True)
    # A mask for each head.
    pairs = layers.Lambda(lambda found: found[:, None, :, None] + found[:, None, None, :])(words)
    visible = layers.Lambda(lambda sums: (sums + np.arange(3)[:, None, None]) % 3 > 0)(pairs)
    of_heads = layers.MultiHeadAttention(3, 4, name="of_heads")(table(words), table(words), attention_mask=visible)
    logits = table(layers.Add()([outputs, masked, of_heads]), reverse=True)
    all_of_it = layers.Concatenate()([layers.Flatten()(logits), layers.Flatten()(scores)])
    return keras.Model(words, layers.Dense(NUM_CLASSES, name="logits")(all_of_it))


def called_twice() -> keras.Model:
    """A layer that is called twice, with a penalty; a softmax; convolutions; a layer in a loop."""
    words = layers.Input((4,), dtype="int32")
    shared = layers.Dense(6, "softmax", kernel_regularizer="l2", name="shared")
    outputs = shared(shared(layers.Embedding(12, 6, name="table")(words)))
    outputs = layers.Conv1D(5, 2, activation="relu", name="first")(outputs)
    outputs = layers.LeakyReLU()(outputs)
    outputs = layers.Conv1D(4, 2, name="second")(outputs)
    outputs = layers.Conv1D(4, 2, padding="causal", name="causal")(outputs)
    outputs = layers.TimeDistributed(layers.Dense(5, name="inner"), name="each")(outputs)
    return keras.Model(words, layers.Dense(NUM_CLASSES, name="logits")(layers.Flatten()(outputs)))


def assert_equals_one_device(build, grid: str, rule, rate: float, num_steps: int) -> None:
    """Asserts that a sliced model of words has the parameters and evaluation of one device, in float64."""
    options = StepOptions(rule=rule, schedule=Constant(rate), precision="float64")
    found = slices_strategy(words_task(build), cpus_in_groups(grid), options)
    expected = towers_strategy(words_task(build), cpus(1), options)
    for strategy in (found, expected):
        strategy.run_steps(num_steps)
    values, wanted = parameters_of(found), parameters_of(expected)
    # The gradients of the keys' biases are rounding errors, which Adam amplifies.
    for name in ("attention/key/bias", "of_heads/key/bias"):
        values.pop(name, None), wanted.pop(name, None)
    assert_close(values, wanted, 1e-9)
    assert found.evaluate() == pytest.approx(expected.evaluate(), rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("build, grid", [(attending, "slice:2"), (called_twice, "slice:3")])
def test_layers_in_every_use_equal_one_device(build, grid):
    """Three heads on two devices; layers that three devices can't divide evenly either."""
    assert_equals_one_device(build, grid, Adam(), rate=0.01, num_steps=5)


@pytest.mark.filterwarnings("ignore:Layer 'flatten.* does not support masking")
@pytest.mark.parametrize("causal", first_quick([False, True]))
def test_an_attention_gets_the_mask_of_its_query(causal):
    """Keras reads the mask from a tensor; slices have tensors of their own. The sum sees masked positions."""

    def build():
        words = layers.Input((4,), dtype="int32")
        found = layers.Embedding(12, 6, mask_zero=True, name="table")(words)
        attention = layers.MultiHeadAttention(2, 3, name="attention")(found, found, use_causal_mask=causal)
        outputs = layers.Flatten()(layers.Add()([found, attention]))
        return keras.Model(words, layers.Dense(NUM_CLASSES, name="logits")(outputs))

    assert (WORDS == 0).any()
    assert_equals_one_device(build, "slice:2", SGD(), rate=0.1, num_steps=2)


def adapted() -> layers.MultiHeadAttention:
    """An attention whose queries and values have low-rank matrices beside their kernels."""
    attention = layers.MultiHeadAttention(2, 3, name="attention")
    attention.build((None, 4, 6), (None, 4, 6))
    for projection in (attention._query_dense, attention._value_dense):
        projection.enable_lora(2)
    return attention


def penalized() -> layers.MultiHeadAttention:
    """An attention with a penalty on the outputs of all its projections."""
    return layers.MultiHeadAttention(2, 3, activity_regularizer="l2", name="attention")


def attended_by(make) -> keras.Model:
    words = layers.Input((4,), dtype="int32")
    vectors = layers.Embedding(12, 6, name="table")(words)
    attended = layers.Flatten()(make()(vectors, vectors))
    return keras.Model(words, layers.Dense(NUM_CLASSES, name="logits")(attended))


@pytest.mark.parametrize("make", [adapted, penalized])
def test_an_attention_whose_projections_need_calls_of_their_own_is_whole(make):
    splits = {found.path: found.split for found in Layout(attended_by(make), 2).layers}
    assert {split for path, split in splits.items() if path.startswith("attention")} == {"whole"}, splits


@pytest.mark.full
@pytest.mark.parametrize("make", [adapted, penalized])
def test_a_whole_attention_equals_one_device(make):
    build = functools.partial(attended_by, make)
    options = StepOptions(schedule=Constant(0.1), precision="float64")
    found = slices_strategy(words_task(build), cpus_in_groups("slice:2"), options)
    expected = towers_strategy(words_task(build), cpus(1), options)
    for strategy in (found, expected):
        strategy.run_steps(2)
    assert_close(parameters_of(found), parameters_of(expected), 1e-9)
