"""A tower that computes activations again: the same numbers, other operations, less memory."""

import functools
import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.launch.nursery import run_forked
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.recompute import peak_program
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, images, parameters_of, trainer_of
from towers.options import StepOptions
from towers.recompute.ranges import RangeRecorder
from towers.recompute.segments import segments_of
from towers.task import Batch
from towers.tower import TowerFunction

NUM_BLOCKS = 2


def residual_network(activation: str = "relu") -> keras.Model:
    """A chain of blocks whose second computation could differ: random numbers and moving statistics."""
    outputs = inputs = layers.Input((6, 6, 3))
    outputs = layers.Conv2D(4, 3, padding="same", name="stem")(outputs)
    for index in range(NUM_BLOCKS):
        hidden = layers.Conv2D(4, 3, padding="same", use_bias=False, name=f"conv{index}")(outputs)
        hidden = layers.BatchNormalization(name=f"norm{index}")(hidden)
        hidden = layers.Dropout(0.2, name=f"dropout{index}")(layers.Activation(activation)(hidden))
        outputs = layers.Add()([outputs, hidden])
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(layers.Flatten()(outputs)))


class OwnNetwork(keras.Model):
    """The same network, within the call of a subclassed model."""

    def __init__(self, build=residual_network):
        super().__init__()
        self.network = build()

    def call(self, inputs):
        return self.network(inputs)


def frozen_network() -> keras.Model:
    """The same network with a frozen stem and first block."""
    model = residual_network()
    for layer in model.layers:
        layer.trainable = layer.name != "stem" and not layer.name.endswith("0")
    return model


def after_steps(recompute: str, build=residual_network, num_steps: int = 2, num_towers: int = 2, **options):
    """Parameters, state and losses of a run."""
    task = TinyTask(build=build, examples=images(12))
    strategy = trainer_of(task, num_towers, recompute=recompute, **options)
    losses = [strategy.run_steps(1).loss for _ in range(num_steps)]
    state = {name: variable.numpy() for name, variable in strategy.checkpointables()["state"].items()}
    return {**parameters_of(strategy), **state, "losses": np.array(losses)}


@functools.cache
def without(**options):
    """A run that keeps all activations."""
    return after_steps("none", **options)


CASES = first_quick(
    [
        ("blocks", {}),
        ("full", {}),
        ("sqrt", {"batch_stats": "synced"}),
        ("full", {"precision": "bfloat16", "accumulation": 3}),
        ("blocks", {"build": functools.partial(residual_network, "gelu")}),
        ("full", {"build": frozen_network}),
    ]
)


@pytest.mark.parametrize("recompute, options", CASES)
def test_a_run_gives_the_same_bits(recompute, options):
    """Dropout draws the same masks, moving statistics move once, exchanged statistics are those of all towers."""
    found, expected = after_steps(recompute, **options), without(**options)
    # Sums over towers are added in any order.
    tolerance = 1e-4 if "batch_stats" in options else 0.0
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance * 1e-3, err_msg=name)


def traced(recompute: str, build=residual_network):
    """The nodes of the tower's graph after TensorFlow's graph optimizer."""
    model = build()
    model(tf.zeros([1, 6, 6, 3]))
    kernels = StepOptions(tuned_for_cpu=False).kernels(cpus(1))
    task = TinyTask(build=build, examples=images(4))
    tower = TowerFunction(task, model, kernels=kernels, recompute=recompute)
    values = [
        [tf.constant(v.numpy()) for v in kept] for kept in (tower.variables.parameters, tower.variables.state)
    ]
    graphs = []

    @tf.function(autograph=False)
    def step(features, labels):
        result = tower(*values, Batch(features, labels), tf.constant([1, 2]), tf.constant(1.0))
        graphs.append(tf.compat.v1.get_default_graph())
        return result.loss_sum

    concrete = step.get_concrete_function(tf.TensorSpec([None, 6, 6, 3]), tf.TensorSpec([None], tf.int32))
    return [node for function in concrete.graph.as_graph_def().library.function for node in function.node_def]


@pytest.mark.full
def test_the_peak_of_memory_falls(tmp_path):
    peaks = {}
    for recompute in ("none", "blocks"):
        done = run_forked("-m", peak_program.__name__, recompute, cwd=tmp_path)
        assert done.code == 0, done.err
        peaks[recompute] = float(done.out)
    # Both peaks include graph, threads and gradients. A few recomputed blocks may be alive at the same time.
    assert peaks["none"] - peaks["blocks"] > peak_program.NUM_BLOCKS / 2 * peak_program.HIDDEN_MEBIBYTES, peaks


class SharedLayers(keras.Model):
    """A model that calls an inner model made of its own layers."""

    def __init__(self):
        super().__init__()
        inputs = layers.Input((6, 6, 3))
        self.first, self.second = layers.Conv2D(3, 1, name="first"), layers.Conv2D(3, 1, name="second")
        self.features = keras.Model(inputs, self.second(self.first(inputs)), name="features")
        self.logits = layers.Dense(NUM_CLASSES, name="logits")

    def call(self, inputs):
        hidden = self.first(self.features(inputs))
        return self.logits(tf.reduce_mean(hidden, [1, 2]))


def recorded(model: keras.Model, recompute: str):
    """The ranges of the model's parts, and the operations of the graph."""
    recorders, shape = [], (6, 6, 3)
    model(tf.zeros([1, *shape]))

    @tf.function(autograph=False)
    def called():
        recorders.append(RangeRecorder(segments_of(model, recompute), model))
        with recorders[0].recording():
            return model(tf.zeros([2, *shape]))

    operations = called.get_concrete_function().graph.get_operations()
    return recorders[0].ranges, operations


@pytest.mark.parametrize("recompute", ["full", "blocks"])
def test_parts_of_shared_layers_do_not_overlap(recompute):
    """Otherwise operations would be copied twice, under one name."""
    ranges, _ = recorded(SharedLayers(), recompute)
    assert len(ranges) >= 3
    for one, after in itertools.pairwise(ranges):
        assert one.begin < one.end <= after.begin


def wrapped_network() -> keras.Model:
    """A chain that calls one layer by itself, and before that through a layer that calls it several times."""
    inputs, shared = layers.Input((6, 6, 3)), layers.Dense(4, name="shared")
    outputs = layers.Dense(4, name="dense")(inputs)
    outputs = layers.TimeDistributed(shared, name="wrapper")(outputs)
    for _ in range(6):
        outputs = shared(outputs)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(layers.Flatten()(outputs)))


class OutsideNetwork(keras.Model):
    """Calls a layer of the model within it before this model does."""

    def __init__(self):
        super().__init__()
        self.first, self.network = layers.Dense(4, name="first"), wrapped_network()

    def call(self, inputs):
        return self.network(self.network.get_layer("shared")(self.first(inputs))[..., :3])


@pytest.mark.parametrize(
    "build, recompute",
    first_quick([(wrapped_network, "sqrt"), (OutsideNetwork, "full"), (wrapped_network, "full")], 2),
)
def test_calls_by_other_layers_are_not_counted(build, recompute):
    """Otherwise parts would begin and end at wrong calls, or never end and hide later parts."""
    model = build()
    ranges, operations = recorded(model, recompute)
    segments = segments_of(model, recompute)
    assert any(segment.first.name == "shared" for segment in segments)
    for segment, one in zip(segments, ranges, strict=True):
        for layer, operation in ((segment.first, operations[one.begin]), (segment.last, operations[one.end - 1])):
            # The wrapper's calls of the shared layer are in the wrapper's scope.
            assert re.search(rf"(^|/){layer.name}_\d+/", operation.name), segment


def recurrent_network() -> keras.Model:
    inputs = layers.Input((6, 6, 3))
    rows = layers.Reshape((6, 18))(inputs)
    for index in range(2):
        rows = layers.LSTM(5, return_sequences=True, name=f"lstm{index}")(rows)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(layers.Flatten()(rows)))


def test_a_loops_lists_of_activations_are_computed_again():
    """Such a list has a scalar's shape. The backward pass pops from the copied loop's list: the first is freed."""
    loops = [node for node in traced("full", recurrent_network) if node.op in ("While", "StatelessWhile")]
    copied = {node.name for node in loops if node.name.endswith("_recomputed")}
    firsts = {name.removesuffix("_recomputed") for name in copied}
    assert len(copied) == 2  # both layers come before the last part
    backward = [node for node in loops if node.name not in copied | firsts]
    assert len(backward) == 2
    for node in backward:
        lists = {
            name.partition(":")[0]
            for name, dtype in zip(node.input, node.attr["T"].list.type, strict=False)
            if dtype == tf.variant.as_datatype_enum
        }
        assert lists & copied and not lists & firsts, sorted(lists)


def pooled_network() -> keras.Model:
    inputs = layers.Input((6, 6, 3))
    hidden = layers.SeparableConv2D(4, 3, activation="elu")(inputs)
    hidden = layers.GlobalMaxPooling2D()(hidden)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(hidden))


def test_a_maximum_is_compared_with_what_it_is_the_maximum_of():
    """A second computation's last bits may differ from the maximum: no element would equal it."""
    nodes = traced("full", pooled_network)
    assert any(node.name.endswith("_recomputed") for node in nodes)
    compared = [name for node in nodes if node.op == "Equal" for name in node.input]
    assert compared and not [name for name in compared if "_recomputed" in name]


# With oneDNN the optimizer joins a norm with the ReLU that follows.
NORMS = ("FusedBatchNormV3", "_FusedBatchNormEx")


def count(nodes, *kinds: str) -> int:
    return sum(node.op in kinds for node in nodes)


def test_the_optimizer_does_not_merge_the_second_computation_with_the_first():
    kept, again = traced("none"), traced("blocks")
    # The stem and the logits are computed once; a block's last operations, dropout and sum, are not needed again.
    assert count(kept, "Conv2D") == NUM_BLOCKS + 1
    assert count(again, "Conv2D") == 2 * NUM_BLOCKS + 1
    assert count(again, *NORMS) == 2 * count(kept, *NORMS) == 2 * NUM_BLOCKS
    assert count(again, "Conv2DBackpropFilter") == count(kept, "Conv2DBackpropFilter")
    # A block's backward pass reads only the results of the second computation.
    read = {name.split(":")[0] for node in again if node.op == "FusedBatchNormGradV3" for name in node.input}
    first = {node.name for node in again if node.op == "Conv2D" and not node.name.endswith("_recomputed")}
    assert not read & first


@pytest.mark.parametrize("build", first_quick([frozen_network, functools.partial(OwnNetwork, frozen_network)]))
def test_frozen_layers_at_the_begin_are_computed_once(build):
    kept, again = traced("none", build), traced("full", build)
    assert count(kept, "Conv2D") == NUM_BLOCKS + 1
    assert count(again, "Conv2D") == NUM_BLOCKS + 2, "the block that is trained"


@pytest.mark.full
def test_layers_of_a_subclassed_model_are_computed_again():
    assert count(traced("blocks", OwnNetwork), *NORMS) == 2 * NUM_BLOCKS
