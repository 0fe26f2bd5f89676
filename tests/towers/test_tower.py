"""The tower: traced once, run on its own device, a pure function of parameters, state, examples and seed."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.tiers import first_quick
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.tiny_tasks import (
    NUM_CLASSES,
    TinyTask,
    assert_close,
    cross_entropy,
    dense_network,
    images,
    parameters_of,
    squared_error,
    stacked,
    trainer_of,
    vectors,
)
from tests.towers.user_errors import refused
from towers.task import Batch
from towers.tower import ModelVariables, TowerFunction
from towers.updates.rules import SGD

# Two forward convolutions, two gradients of filters, one gradient of the second one's inputs. The types of these
# operations all contain 'Conv2D', fused or not.
CONVOLUTIONS_OF_A_TOWER = 5


def convolution_task() -> TinyTask:
    def build():
        return stacked(
            (6, 6, 3),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(5, 3),
            layers.Flatten(),
            layers.Dense(NUM_CLASSES),
        )

    return TinyTask(build=build, examples=images(35), batch_size=12)


@functools.cache
def graphs_of_a_step(num_towers: int, parameters: int, accumulation: int = 1):
    """The strategy, and the graphs of its first step; tests may train it further."""
    strategy = trainer_of(convolution_task(), num_towers, parameters=parameters, accumulation=accumulation)
    with recorded_graphs() as graphs:
        strategy.run_steps(1)
    return strategy, graphs


# (towers, index of the parameters' device): a tower's device, or a separate one.
PLACEMENTS = first_quick([(3, 2), (3, 0), (2, 2)])


@pytest.mark.parametrize("num_towers, parameters", PLACEMENTS)
def test_convolutions_run_on_their_towers_device(num_towers, parameters):
    _, graphs = graphs_of_a_step(num_towers, parameters)
    expected = {f"CPU:{index}": CONVOLUTIONS_OF_A_TOWER for index in range(num_towers)}
    assert graphs.devices_of("Conv2D") == expected


@pytest.mark.parametrize("num_towers, parameters", PLACEMENTS)
def test_batch_norms_run_on_their_towers_device(num_towers, parameters):
    _, graphs = graphs_of_a_step(num_towers, parameters)
    assert graphs.devices_of("FusedBatchNorm").keys() == {f"CPU:{index}" for index in range(num_towers)}


@pytest.mark.parametrize("num_towers, parameters", PLACEMENTS)
def test_updates_run_on_the_parameters_device(num_towers, parameters):
    strategy, graphs = graphs_of_a_step(num_towers, parameters)
    num_parameters = len(strategy.engine.parameters())
    assert graphs.devices_of("ResourceApply") == {f"CPU:{parameters}": num_parameters}


@pytest.mark.parametrize("num_towers, parameters", PLACEMENTS)
def test_variables_live_on_the_parameters_device(num_towers, parameters):
    kept = graphs_of_a_step(num_towers, parameters)[0].checkpointables()
    variables = [*kept["parameters"].values(), *kept["state"].values(), *kept["slots"]["momentum"].values()]
    assert {variable.device.rpartition("device:")[2] for variable in variables} == {f"CPU:{parameters}"}


@pytest.mark.parametrize("num_towers, parameters", first_quick([(3, 2), (2, 2)]))
def test_each_parameter_is_sent_once_to_each_tower(num_towers, parameters):
    strategy, graphs = graphs_of_a_step(num_towers, parameters)
    # Moving statistics are sent as parameters are.
    num_sent = len(strategy.engine.parameters()) + len(strategy.engine.state())
    for index in set(range(num_towers)) - {parameters}:
        copies = graphs.copies(f"CPU:{parameters}", f"CPU:{index}")
        assert len(copies) == num_sent
        assert set(copies.values()) == {1}


@pytest.mark.full
def test_each_parameter_is_sent_once_from_the_first_tower_to_the_others():
    _, graphs = graphs_of_a_step(3, 0)
    for index in (1, 2):
        assert set(graphs.copies("CPU:0", f"CPU:{index}").values()) == {1}


def test_microbatches_run_on_their_towers_device():
    _, graphs = graphs_of_a_step(2, 2, accumulation=3)
    # One graph computes the first microbatch, and another one all later microbatches.
    assert graphs.devices_of("Conv2D") == {f"CPU:{index}": 2 * CONVOLUTIONS_OF_A_TOWER for index in (0, 1)}


@pytest.mark.parametrize("num_towers, accumulation", first_quick([(2, 3), (4, 1)]))
def test_traced_once_for_any_number_of_towers_and_examples(num_towers, accumulation):
    """35 examples in batches of 12: the last batch has 11, so the tower gets parts of several lengths."""
    strategy, _ = graphs_of_a_step(num_towers, 2, accumulation)
    strategy.run_steps(3)
    assert strategy.engine.tower.num_traces == 1


def test_the_template_is_never_written():
    strategy, _ = graphs_of_a_step(3, 2)
    before = [variable.numpy() for variable in strategy.model.variables]
    strategy.run_steps(2)
    for variable, value in zip(strategy.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


# --- what a network may contain


def keras_steps(task: TinyTask, num_steps: int, rate: float) -> dict[str, np.ndarray]:
    """The parameters after plain gradient descent, by Keras and a tape, on undivided batches."""
    keras.utils.set_random_seed(0)
    model = task.build_model()
    batch = tf.nest.map_structure(tf.constant, task.examples)
    for _ in range(num_steps):
        with tf.GradientTape() as tape:
            outputs = model(batch.features, training=True)
            loss = tf.reduce_mean(task.losses(outputs, batch))
            if model.losses:
                loss += tf.add_n(model.losses)
        weights = model.trainable_variables
        for variable, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            variable.assign_sub(rate * tf.convert_to_tensor(gradient))
    return {variable.path: variable.numpy() for variable in model.trainable_variables}


def regularized_network():
    strong = keras.regularizers.L2(0.3)
    return stacked(
        (4,),
        layers.Dense(5, "tanh", kernel_regularizer=strong, name="hidden"),
        layers.Dense(NUM_CLASSES, kernel_regularizer=strong, activity_regularizer=None, name="logits"),
    )


SPLITS = first_quick([(3, (5, 3, 2)), (1, None), (4, None)])


@pytest.mark.parametrize("num_towers, shares", SPLITS)
def test_regularization_is_exact_under_any_split(num_towers, shares):
    task = TinyTask(build=regularized_network, examples=vectors(11))
    strategy = trainer_of(task, num_towers, shares=shares, rule=SGD())
    report = strategy.run_steps(3)
    assert_close(parameters_of(strategy), keras_steps(task, 3, 0.1))
    assert report.loss > 1.5, "the reported loss lacks the regularisation"


def two_headed_network():
    """Inputs and outputs are dicts; words are embedded."""
    inputs = {"words": layers.Input((3,), dtype="int32", name="words"), "place": layers.Input((2,), name="place")}
    words = layers.Flatten(name="flatten")(layers.Embedding(7, 4, name="embedding")(inputs["words"]))
    joined = layers.Concatenate(name="join")([words, inputs["place"]])
    outputs = {
        "class": layers.Dense(NUM_CLASSES, name="class")(joined),
        "value": layers.Dense(1, name="value")(joined),
    }
    return keras.Model(inputs, outputs)


def two_headed_task(count: int) -> TinyTask:
    draw = np.random.default_rng(4)
    features = {
        "words": draw.integers(0, 7, (count, 3)).astype(np.int32),
        "place": draw.normal(size=(count, 2)).astype(np.float32),
    }
    labels = {
        "class": draw.integers(0, NUM_CLASSES, count).astype(np.int32),
        "value": draw.normal(size=(count, 1)).astype(np.float32),
    }

    def losses(outputs, batch):
        of_class = cross_entropy(outputs["class"], Batch(batch.features, batch.labels["class"]))
        return of_class + squared_error(outputs["value"], Batch(batch.features, batch.labels["value"]))

    return TinyTask(build=two_headed_network, examples=Batch(features, labels), losses=losses)


@pytest.mark.parametrize("num_towers, shares", SPLITS)
def test_several_inputs_and_outputs_and_embeddings(num_towers, shares):
    task = two_headed_task(11)
    strategy = trainer_of(task, num_towers, shares=shares, rule=SGD())
    strategy.run_steps(3)
    assert_close(parameters_of(strategy), keras_steps(task, 3, 0.1))


def test_constraints_are_applied_after_every_update():
    def build():
        positive = layers.Dense(NUM_CLASSES, kernel_constraint="non_neg", name="logits")
        return stacked((4,), positive)

    found = []
    for num_towers in (1, 3):
        strategy = trainer_of(TinyTask(build=build, examples=vectors(11)), num_towers)
        strategy.run_steps(3)
        found.append(parameters_of(strategy))
    assert found[0]["logits/kernel"].min() == 0 and found[0]["logits/kernel"].max() > 0
    assert found[0]["logits/bias"].min() < 0
    assert_close(found[1], found[0])


def test_frozen_layers_stay_bit_for_bit():
    def build():
        model = dense_network()
        model.get_layer("hidden").trainable = False
        return model

    strategy = trainer_of(TinyTask(build=build, examples=vectors(11)), 3)
    before = {name: variable.numpy() for name, variable in strategy.engine.state().items()}
    strategy.run_steps(3)
    assert set(before) == {"hidden/kernel", "hidden/bias"}
    assert set(parameters_of(strategy)) == {"logits/kernel", "logits/bias"}
    for name, variable in strategy.engine.state().items():
        np.testing.assert_array_equal(variable.numpy(), before[name])


def test_new_state_is_only_what_a_pass_changes():
    """Frozen weights may be large: each step would average them over the towers, and send them around a ring."""
    frozen = layers.Dense(8, trainable=False, name="frozen")
    norms = layers.BatchNormalization(name="norm"), layers.BatchNormalization(trainable=False)
    model = stacked((4,), frozen, *norms, layers.Dense(NUM_CLASSES))
    tower = TowerFunction(TinyTask(build=lambda: model, examples=vectors(5)), model)
    variables = tower.variables
    values = ([tf.convert_to_tensor(one) for one in kind] for kind in (variables.parameters, variables.state))
    result = tower(*values, Batch(*map(tf.constant, vectors(5)[:2])), tf.zeros([2], tf.int32), tf.constant(1.0))
    changed = {variables.state[index].path for index in result.new_state}
    assert len(variables.state) == 8 and changed == {"norm/moving_mean", "norm/moving_variance"}


# --- dropout

WIDTH = 64


def mask_task(count: int) -> TinyTask:
    """Examples of ones. With rate 1, a step subtracts the mean of the masks (0 or 2) from the weights."""

    def build():
        head = layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="head")
        return stacked((WIDTH,), layers.Dropout(0.5), head)

    ones = Batch(np.ones((count, WIDTH), np.float32), np.zeros((count, 1), np.float32))
    return TinyTask(build=build, examples=ones, losses=lambda outputs, batch: tf.reduce_sum(outputs, 1))


def mean_mask(num_towers: int, *, num_steps: int = 1, seed: int = 0, accumulation: int = 1) -> np.ndarray:
    """[WIDTH] mean dropout mask over all examples and steps."""
    task = mask_task(num_towers * accumulation)
    strategy = trainer_of(task, num_towers, rate=1.0, rule=SGD(), seed=seed, accumulation=accumulation)
    strategy.run_steps(num_steps)
    return -parameters_of(strategy)["head/kernel"][:, 0] / num_steps


def test_one_tower_drops_half():
    mask = mean_mask(1)
    assert set(mask) == {0.0, 2.0} and 16 < np.count_nonzero(mask) < 48


@pytest.mark.parametrize("num_towers, accumulation", [(2, 1), (1, 2)])
def test_towers_and_microbatches_drop_differently(num_towers, accumulation):
    """If the masks were equal, their mean would be 0 or 2 everywhere."""
    assert np.count_nonzero(mean_mask(num_towers, accumulation=accumulation) == 1.0) > 10


def test_steps_drop_differently():
    assert np.count_nonzero(mean_mask(1, num_steps=2) == 1.0) > 10


def test_dropout_is_reproducible_from_the_seed():
    first = mean_mask(2, num_steps=2, seed=5)
    np.testing.assert_array_equal(mean_mask(2, num_steps=2, seed=5), first)
    assert np.any(mean_mask(2, num_steps=2, seed=6) != first)


def test_dropout_layers_of_one_model_drop_differently():
    """Two layers in a row let a quarter of the numbers pass; with equal masks it would be a half."""

    def build():
        head = layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="head")
        return stacked((WIDTH,), layers.Dropout(0.5), layers.Dropout(0.5), head)

    plain = mask_task(1)
    task = TinyTask(build=build, examples=plain.examples, losses=plain.losses)
    strategy = trainer_of(task, rate=1.0, rule=SGD())
    strategy.run_steps(1)
    assert 4 < np.count_nonzero(parameters_of(strategy)["head/kernel"]) < 28


def test_evaluation_drops_nothing():
    strategy = trainer_of(mask_task(2), 2, rate=1.0, rule=SGD())
    strategy.run_steps(1)
    expected = parameters_of(strategy)["head/kernel"].sum()
    assert strategy.evaluate()["loss"] == pytest.approx(expected)


def test_a_tied_tables_gradient_has_a_known_shape():
    """It is the sum of the rows of lookups and of a whole matrix. Rings and servers pack gradients by size."""
    inputs, table = layers.Input((2,), dtype="int32"), layers.ReversibleEmbedding(NUM_CLASSES, 4)
    logits = table(layers.GlobalAveragePooling1D()(table(inputs)), reverse=True)
    batch = Batch(tf.constant([[0, 1], [1, 2]]), tf.constant([0, 2]))
    model = keras.Model(inputs, logits)
    tower = TowerFunction(TinyTask(build=lambda: model, examples=batch), model)
    values = [tf.convert_to_tensor(variable.value) for variable in tower.variables.parameters]

    @functools.partial(tf.function, autograph=False)
    def trace():
        result = tower(values, [], batch, tf.constant([1, 2]), tf.constant(1.0))
        shapes.extend(gradient.shape for gradient in result.gradients)

    shapes = []
    trace()
    assert shapes == [(NUM_CLASSES, 4)]


# --- what is refused


def test_a_parameter_without_a_gradient_is_named():
    def build():
        inputs = layers.Input((4,))
        outputs = {
            "used": layers.Dense(NUM_CLASSES, name="used")(inputs),
            "idle": layers.Dense(2, name="idle")(inputs),
        }
        return keras.Model(inputs, outputs)

    task = TinyTask(
        build=build, examples=vectors(8), losses=lambda outputs, batch: cross_entropy(outputs["used"], batch)
    )
    with refused("idle/kernel, idle/bias", "trainable=False"):
        trainer_of(task, 2).run_steps(1)


def test_a_model_that_is_not_built():
    with refused("'unbuilt'", "is not built"):
        ModelVariables.of(keras.Sequential([layers.Dense(2)], name="unbuilt"))


def test_a_model_with_nothing_to_train():
    model = dense_network()
    model.trainable = False
    with refused(repr(model.name), "no trainable variables"):
        ModelVariables.of(model)
