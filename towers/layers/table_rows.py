"""Embedding layers that look up rows in a part of their table.

A table may be too large for a tower. The tower then gets only the rows that its batch names:

    ids of the batch    [5, 2, 5]
    TableRows           ids [2, 5], values [2, width]      ascending, each row once
    the layer           looks id 5 up at index 1, id 2 at index 0
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

_WAITING = "uninitialized_variables"


class TableRows(NamedTuple):
    """Some rows of a table, which a tower gets instead of the table.

    Attributes:
      ids: int64 [n], ascending, each id once; they include all ids of the batch.
      values: [n, width].
    """

    ids: tf.Tensor
    values: tf.Tensor

    def gradient(self, of_values, height: int) -> tf.IndexedSlices:
        """The gradient of a table with `height` rows, from the gradient of `values`."""
        shape = tf.constant([height, self.values.shape[1]], tf.int64)
        if isinstance(of_values, tf.IndexedSlices):
            return tf.IndexedSlices(of_values.values, tf.gather(self.ids, of_values.indices), shape)
        return tf.IndexedSlices(of_values, self.ids, shape)


@contextlib.contextmanager
def tables_without_values():
    """Context manager: Embedding layers built in it get tables with a shape but without values.

    For a template in a process that never reads the tables: they may be larger than its memory.
    """
    build = keras.layers.Embedding.build

    def build_without(self, input_shape=None):
        waiting = list(global_state.get_global_attribute(_WAITING, []))
        with keras.StatelessScope(initialize_variables=False):
            build(self, input_shape)
        # Otherwise the end of any later scope would initialize all variables that wait for a value.
        global_state.set_global_attribute(_WAITING, waiting)

    keras.layers.Embedding.build = build_without
    try:
        yield
    finally:
        keras.layers.Embedding.build = build


def layers_of_tables(model: keras.Model) -> dict[str, keras.layers.Embedding]:
    """The Embedding layers whose table rows could be looked up alone, by the path of the table's variable."""
    return {
        layer.embeddings.path: layer
        for layer in model._flatten_layers()
        # A subclass may read its table in another way; so do LoRA and quantization.
        if type(layer) is keras.layers.Embedding and layer.built and [*layer.variables] == [layer.embeddings]
    }


def row_ids(layer: keras.layers.Embedding, inputs: tf.Tensor) -> tf.Tensor:
    """int64 ids of the rows that the layer looks up, as Keras computes them: -1 is the last row."""
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    ids = tf.cast(ids, tf.int64)
    return tf.where(ids < 0, ids + layer.input_dim, ids)


def lookups_in_rows(
    tables: Mapping[keras.layers.Embedding, TableRows],
) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, 'call', function) for each layer, for `shadowed`: the layer looks up these rows, not its table."""
    return [(layer, "call", _call_of(layer, rows)) for layer, rows in tables.items()]


def _call_of(layer: keras.layers.Embedding, rows: TableRows):
    def call(inputs):
        ids = row_ids(layer, inputs)
        index = tf.searchsorted(rows.ids, tf.reshape(ids, [-1]))
        found = tf.gather(rows.values, tf.reshape(index, tf.shape(ids)))
        return tf.cast(found, layer.compute_dtype)

    return call
