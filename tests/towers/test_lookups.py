"""Which tables of a model are read by a batch's ids alone, and by which ids."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from towers.layers.table_rows import TableRows, tables_without_values
from towers.lookups import Lookups
from towers.task import Batch, WeightedLoss
from towers.tower import TowerFunction

ROWS, WIDTH = 50, 4
SPEC = Batch({"ids": tf.TensorSpec([None, 3], tf.int32), "numbers": tf.TensorSpec([None, 4], tf.float32)})


class Scores(layers.Layer):
    """Scores of all rows of a table, as in a model with tied weights."""

    def __init__(self, table):
        super().__init__()
        self._table = table

    def call(self, inputs):
        return ops.matmul(inputs, ops.transpose(self._table.embeddings))


def model_of(make_outputs) -> keras.Model:
    ids, numbers = layers.Input((3,), dtype="int32", name="ids"), layers.Input((4,), name="numbers")
    table = layers.Embedding(ROWS, WIDTH, name="table")
    outputs = layers.Flatten()(make_outputs(table, ids, numbers))
    return keras.Model({"ids": ids, "numbers": numbers}, layers.Dense(2, name="logits")(outputs))


def tied(table, ids, numbers):
    return Scores(table)(table(ids))


def computed(table, ids, numbers):
    return table(ops.cast(ops.relu(layers.Dense(3)(numbers)), "int32"))


def also_computed(table, ids, numbers):
    return layers.Concatenate(axis=1)([table(ids), computed(table, ids, numbers)])


def in_a_loop(table, ids, numbers):
    """The ids of this lookup can't be read outside of the loop's body."""
    return layers.Lambda(lambda ids: ops.map(table, ids), output_shape=(3, WIDTH))(ids) + table(ids)


class Chosen(layers.Layer):
    """The rows of a table, if their ids are not all 0."""

    def __init__(self, table):
        super().__init__()
        self._table = table

    def call(self, ids):
        return ops.cond(ops.any(ids), lambda: self._table(ids), lambda: ops.zeros([*ops.shape(ids), WIDTH]))


def in_a_condition(table, ids, numbers):
    return Chosen(table)(ids) + table(ids)


@pytest.mark.parametrize("make_outputs", [tied, computed, also_computed, in_a_loop, in_a_condition])
def test_a_table_that_is_read_otherwise(make_outputs):
    assert Lookups(model_of(make_outputs), SPEC).heights == {}


def test_a_table_with_a_loss_of_its_own():
    ids = layers.Input((3,), dtype="int32", name="ids")
    table = layers.Embedding(ROWS, WIDTH, embeddings_regularizer="l2")
    model = keras.Model({"ids": ids}, layers.Dense(2)(layers.Flatten()(table(ids))))
    assert Lookups(model, Batch({"ids": SPEC.features["ids"]})).heights == {}


def test_a_subclass_may_look_up_otherwise():
    class Doubled(layers.Embedding):
        def call(self, inputs):
            return 2 * super().call(inputs)

    ids = layers.Input((3,), dtype="int32", name="ids")
    model = keras.Model({"ids": ids}, layers.Dense(2)(layers.Flatten()(Doubled(ROWS, WIDTH)(ids))))
    assert Lookups(model, Batch({"ids": SPEC.features["ids"]})).heights == {}


def looked_up_twice(table, ids, numbers):
    """Rows by the ids, and by ids computed from them; -1 is the last row, as in Keras."""
    return layers.Concatenate(axis=1)([table(ids), table((ids * 2) % 7 - 1)])


BATCH = Batch(
    {"ids": np.array([[1, 2, 3], [2, 0, 49]], np.int32), "numbers": np.ones([2, 4], np.float32)},
    np.array([0, 1], np.int32),
)


def test_ids_of_all_lookups():
    lookups = Lookups(model_of(looked_up_twice), SPEC)
    assert lookups.heights == {"table/embeddings": ROWS}
    found = tf.function(lookups.ids, autograph=False)(tf.nest.map_structure(tf.constant, BATCH))
    ids = BATCH.features["ids"]
    expected = np.concatenate([ids, ((ids * 2) % 7 - 1) % ROWS])
    assert sorted(found["table/embeddings"].numpy()) == sorted(expected.ravel())


class Loss:
    """The part of a task that a tower needs."""

    def loss(self, outputs, batch):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels, outputs)
        return WeightedLoss(tf.reduce_sum(losses), tf.constant(2.0))

    def metrics(self, outputs, batch):
        return {}


def test_a_tower_with_rows_gives_the_gradients_of_the_whole_table():
    keras.utils.set_random_seed(1)
    model = model_of(looked_up_twice)
    batch = tf.nest.map_structure(tf.constant, BATCH)
    values = [variable.value.numpy() for variable in model.trainable_variables]
    seed, gain = tf.zeros([2], tf.int32), tf.constant(1.0)

    def gradients(parameters):
        found = TowerFunction(Loss(), model)(parameters, [], batch, seed, gain)
        return [tf.convert_to_tensor(gradient).numpy() for gradient in found.gradients]

    (index,) = (i for i, variable in enumerate(model.trainable_variables) if "table" in variable.path)
    ids = tf.constant([0, 1, 2, 3, 5, 49], tf.int64)
    whole = [tf.constant(value) for value in values]
    rows = list(whole)
    rows[index] = TableRows(ids, tf.gather(whole[index], ids))
    for found, expected in zip(gradients(rows), gradients(whole), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_a_template_without_values():
    """A template is analysed in the same way and never allocates its table."""
    with tables_without_values():
        model = model_of(looked_up_twice)
    assert Lookups(model, SPEC).heights == {"table/embeddings": ROWS}
    table = model.get_layer("table").embeddings
    assert table._value is None and model.get_layer("logits").kernel._value is not None
    assert model_of(looked_up_twice).get_layer("table").embeddings._value is not None
