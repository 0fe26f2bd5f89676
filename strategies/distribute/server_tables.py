"""Matrices of embedding tables whose rows are divided over ParameterServerStrategy's servers."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from strategies.servers.piece_update import update_rows
from strategies.servers.server_memory import variable_bytes
from strategies.servers.tables import TableLayout
from towers.layers.table_rows import TableRows
from towers.updates.rules import UpdateRule


class ServerTable:
    """A matrix of tables and its slots.

    Attributes:
      layout: which row is on which server.
      rows: by server, [rows, width], some of them padding.
      slots: by name, likewise.
    """

    def __init__(
        self, strategy, layout: TableLayout, value: np.ndarray, slot_names: Sequence[str], *, lazily: bool
    ):
        """Args:
        strategy: a ParameterServerStrategy whose partitioner divides evenly over the servers.
        layout: which row is on which server.
        value: [rows, width], all rows.
        slot_names: names of the slots, which are zeros.
        lazily: whether an update changes only the rows with a gradient.
        """
        self.layout, self._lazily = layout, lazily

        def new(values, name):
            with strategy.scope():
                whole = tf.Variable(np.concatenate(layout.dealt(values)), name=name, trainable=False)
            # With one server, TensorFlow creates a plain variable.
            return list(getattr(whole, "variables", [whole]))

        self.rows = new(value, layout.name)
        self.slots = {name: new(np.zeros_like(value), f"{layout.name}_{name}") for name in slot_names}
        self._locks = []
        for piece in self.rows:
            with tf.device(piece.device):
                self._locks.append(tf.CriticalSection(shared_name=f"{layout.name}_lock"))

    def update(self, server: int, rule: UpdateRule, ids, values, rate, update) -> None:
        """Updates rows of a server in a graph, on the current device. A server runs one such update at a time."""
        table = self.rows[server]
        slots = {name: pieces[server] for name, pieces in self.slots.items()}
        rule = rule if self.layout.decays else dataclasses.replace(rule, weight_decay=0.0)
        gradient = tf.IndexedSlices(
            tf.cast(values, table.dtype), ids, tf.constant(table.shape.as_list(), tf.int64)
        )

        def apply():
            update_rows(rule, table, slots, gradient, rate, update, lazily=self._lazily)
            return tf.constant(True)

        self._locks[server].execute(apply)

    def assign(self, value: np.ndarray) -> None:
        """Assigns all rows, from the chief."""
        for piece, part in zip(self.rows, self.layout.dealt(value), strict=True):
            piece.assign(part)

    def kept_bytes(self, server: int) -> int:
        """Bytes of a server's rows and their slots."""
        return variable_bytes(self.rows[server]) * (1 + len(self.slots))

    def read_rows(self, slot: str | None, begin: int, end: int) -> np.ndarray:
        """Rows of the matrix, or of a slot, at the chief."""
        found = np.empty((end - begin, self.layout.width), self.rows[0].dtype.as_numpy_dtype)
        for server, piece in enumerate(self._pieces(slot)):
            first, last, here = self.layout.dealt_range(server, begin, end)
            if first < last:
                with tf.device(piece.device):
                    rows = tf.gather(piece, tf.range(first, last))
                found[here] = rows.numpy()
        return found

    def write_rows(self, slot: str | None, begin: int, values: np.ndarray) -> None:
        """Assigns rows of the matrix, or of a slot, from the chief."""
        for server, piece in enumerate(self._pieces(slot)):
            first, last, here = self.layout.dealt_range(server, begin, begin + len(values))
            if first < last:
                piece.scatter_update(tf.IndexedSlices(values[here], np.arange(first, last)))

    def _pieces(self, slot: str | None) -> list[tf.Variable]:
        return self.rows if slot is None else self.slots[slot]


class DealtRows(NamedTuple):
    """Rows of a matrix, divided by server.

    Attributes:
      ids: by server, int64 [n], ids of the rows on that server.
      positions: by server, int32 [n], positions of its rows in the undivided rows.
    """

    ids: Sequence[tf.Tensor]
    positions: Sequence[tf.Tensor]

    @classmethod
    def of(cls, rows: tf.Tensor, num_servers: int) -> "DealtRows":
        if num_servers == 1:
            return cls([rows], [tf.range(tf.size(rows))])
        owners = tf.cast(rows % num_servers, tf.int32)
        ids = tf.dynamic_partition(rows // num_servers, owners, num_servers)
        return cls(ids, tf.dynamic_partition(tf.range(tf.size(rows)), owners, num_servers))

    def divided(self, values: tf.Tensor) -> Sequence[tf.Tensor]:
        """Values [n, width] of the undivided rows, by server."""
        return [tf.gather(values, positions) for positions in self.positions] if len(self.ids) > 1 else [values]

    def counts(self) -> list[tf.Tensor]:
        """The number of rows by server, float64 scalars."""
        return [tf.cast(tf.size(ids), tf.float64) for ids in self.ids]


def pulled_rows(
    pieces: Sequence[tf.Variable], wanted: tf.Tensor, dealt: DealtRows, *, after: tf.Tensor
) -> TableRows:
    """The wanted rows of a matrix in a worker's graph: each server sends its own rows, read after `after`."""
    found = []
    for piece, ids in zip(pieces, dealt.ids, strict=True):
        with tf.device(piece.device), tf.control_dependencies([after]):
            found.append(tf.gather(piece, ids))
    values = found[0] if len(found) == 1 else tf.dynamic_stitch(dealt.positions, found)
    return TableRows(wanted, tf.ensure_shape(values, [None, pieces[0].shape[1]]))
