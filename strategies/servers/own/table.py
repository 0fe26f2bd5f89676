"""A server's rows of a matrix of embedding tables, with their slots. The caller holds a lock."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from strategies.servers.piece_update import update_rows
from strategies.servers.wire import Refused
from towers.updates.rules import UpdateRule

_HOST = "/device:CPU:0"


class Table:
    """Rows of a matrix."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype, rule: UpdateRule, *, decays: bool, lazily: bool):
        """Args:
        shape: [rows, width]; rows and slots start as zeros.
        dtype: dtype of the rows.
        rule: update rule; it must work element by element.
        decays: whether the rule's weight decay applies.
        lazily: whether an update changes only the rows with a gradient.
        """
        self._rule = rule if decays else dataclasses.replace(rule, weight_decay=0.0)
        self._lazily = lazily
        with tf.device(_HOST):
            self._value = tf.Variable(tf.zeros(shape, dtype), trainable=False)
            self._slots = {name: tf.Variable(tf.zeros(shape, dtype), trainable=False) for name in rule.slot_names}

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Copies of some rows, [n, width]; raises Refused if this server lacks one."""
        self.check(ids)
        with tf.device(_HOST):
            return tf.gather(self._value, ids).numpy()

    def check(self, ids: np.ndarray, values: np.ndarray | None = None) -> None:
        """Raises Refused if this server lacks a row, or if `values` does not have one row for each id."""
        height, width = self._value.shape
        if values is not None and values.shape != (len(ids), width):
            raise Refused(f"rows of shape {list(values.shape)} for {len(ids)} ids of a table of width {width}")
        if len(ids) and not (ids.min() >= 0 and ids.max() < height):
            raise Refused(f"rows {ids.min()} to {ids.max()} of a table of {height} rows")

    def read_part(self, slot: str | None, begin: int, end: int) -> np.ndarray:
        """Copies of rows, or of their slot."""
        with tf.device(_HOST):
            return tf.gather(self._variable(slot), tf.range(begin, end)).numpy()

    def write_part(self, slot: str | None, begin: int, values: np.ndarray) -> None:
        """Sets rows [n, width] from `begin` on, or their slot."""
        ids = np.arange(begin, begin + len(values))
        self.check(ids, values)
        with tf.device(_HOST):
            self._variable(slot).scatter_update(tf.IndexedSlices(values, ids))

    def _variable(self, slot: str | None) -> tf.Variable:
        return self._value if slot is None else self._slots[slot]

    def apply(self, ids: np.ndarray, values: np.ndarray, rate: float, update: int) -> None:
        """Applies one update.

        Args:
          ids: [n], rows, each once.
          values: [n, width], their gradients.
          rate: learning rate.
          update: number of updates before this one.

        Raises:
          Refused: as `check`.
        """
        self.check(ids, values)
        with tf.device(_HOST):
            gradient = tf.IndexedSlices(values, ids, tf.constant(self._value.shape.as_list(), tf.int64))
            rate, update = tf.constant(rate, tf.float32), tf.constant(update, tf.int64)
            update_rows(self._rule, self._value, self._slots, gradient, rate, update, lazily=self._lazily)
