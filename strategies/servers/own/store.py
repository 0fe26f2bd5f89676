"""The vectors of one server, by key, each with slots and an update rule; updates are applied one at a time."""

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from strategies.servers.own.steps.piece_gradient import Rows
from strategies.servers.own.table import Table
from strategies.servers.piece_update import check_rule, update_piece
from strategies.servers.wire import Refused
from towers.errors import UserError
from towers.updates.rules import UpdateRule

_HOST = "/device:CPU:0"


def rate_for(rate: float, staleness: int, *, aware: bool) -> float:
    """The learning rate of an update of this staleness (Zhang et al. 2016, "Staleness-aware async-SGD")."""
    return rate / max(1, staleness) if aware else rate


class Vector:
    """One key's piece on this server, and rows of tables that are updated with it.

    Attributes:
      version: number of updates applied; callers may assign it.
    """

    def __init__(self, value: np.ndarray, rule: UpdateRule, *, decays: np.ndarray | None = None):
        """Args:
        value: [n], floating.
        rule: update rule; it must work element by element.
        decays: [n] bool, the elements that the rule's weight decay applies to; None for all.
        """
        check_rule(rule)
        self._lock = threading.Lock()
        self._rule = rule
        self._tables: dict[str, Table] = {}
        self._arriving: dict[str | None, np.ndarray] = {}
        with tf.device(_HOST):
            self._value = tf.Variable(value, trainable=False)
            self._slots = {
                name: tf.Variable(tf.zeros_like(self._value), trainable=False) for name in rule.slot_names
            }
            self._decays = None if decays is None else tf.constant(decays, self._value.dtype)
        self.version = 0

    @property
    def dtype(self) -> np.dtype:
        return self._value.dtype.as_numpy_dtype

    def read(self) -> tuple[np.ndarray, int]:
        """A copy of the value, never in the middle of an update, and its version."""
        with self._lock:
            return self._value.numpy(), self.version

    def add_table(self, name: str, shape: Sequence[int], *, decays: bool, lazily: bool) -> None:
        """Adds rows of a table; arguments as for `Table`. Replaces an earlier table of that name."""
        table = Table(shape, self.dtype, self._rule, decays=decays, lazily=lazily)
        with self._lock:
            self._tables[name] = table

    def rows(self, ids: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Copies of rows of the tables, by their ids, never in the middle of an update."""
        with self._lock:
            return [self._table(name).read(wanted) for name, wanted in ids.items()]

    def read_part(self, table: str | None, slot: str | None, begin: int, end: int) -> np.ndarray:
        """Elements of the vector, or rows of a table, or of a slot of it."""
        with self._lock:
            if table is not None:
                return self._table(table).read_part(slot, begin, end)
            return self._variable(slot).read_value()[begin:end].numpy()

    def write_part(self, table: str | None, slot: str | None, begin: int, values: np.ndarray) -> None:
        """Sets what `read_part` reads. Parts of a vector must come in order; the last one assigns the whole.

        An assignment to a slice would make each later read of the variable copy it.
        """
        with self._lock:
            if table is not None:
                return self._table(table).write_part(slot, begin, values)
            variable = self._variable(slot)
            length, end = variable.shape[0], begin + len(values)
            if end > length:
                raise Refused(f"elements {begin} to {end} of a piece of {length} numbers")
            whole = self._arriving.setdefault(slot, np.empty(length, self.dtype))
            whole[begin:end] = values
            if end == length:
                variable.assign(self._arriving.pop(slot))

    def _variable(self, slot: str | None) -> tf.Variable:
        return self._value if slot is None else self._slots[slot]

    def _table(self, name):
        if name not in self._tables:
            raise Refused(f"there is no table {name!r}")
        return self._tables[name]

    def apply(
        self,
        gradient: np.ndarray,
        rate: float,
        *,
        rows: Sequence[Rows] = (),
        since: int | None = None,
        aware: bool = False,
    ) -> int:
        """Applies one update to the vector and its tables.

        Args:
          gradient: [n].
          rows: (ids, gradients [k, width]) of each table, in the order in which they were added.
          rate: learning rate.
          since: version that the gradient was computed from; None for the current one.
          aware: whether the rate is divided by the staleness.

        Returns:
          The staleness: the number of other updates applied since version `since`.

        Raises:
          Refused: the gradient has another length than the value, or other tables or rows; nothing is changed.
        """
        with self._lock:
            self._check(gradient, rows)
            staleness = 0 if since is None else self.version - since
            rate = rate_for(rate, staleness, aware=aware)
            for table, (ids, values) in zip(self._tables.values(), rows, strict=True):
                table.apply(ids, values, rate, self.version)
            # Eager: a call of a tf.function of these few operations takes 17 times as long (366 us, not 22).
            with tf.device(_HOST):
                rate, update = tf.constant(rate, tf.float32), tf.constant(self.version, tf.int64)
                update_piece(
                    self._rule, self._value, self._slots, self._decays, tf.constant(gradient), rate, update
                )
            self.version += 1
            return staleness

    def check(self, gradient: np.ndarray, rows: Sequence[Rows]) -> None:
        """Raises Refused for a gradient of another length than the value, of other tables, or of other rows."""
        with self._lock:
            self._check(gradient, rows)

    def _check(self, gradient, rows):
        if gradient.shape != self._value.shape:
            raise Refused(f"a gradient of {gradient.size} numbers for a piece of {self._value.shape[0]} numbers")
        if len(rows) != len(self._tables):
            raise Refused(f"a gradient of {len(rows)} tables for {len(self._tables)} tables")
        for table, (ids, values) in zip(self._tables.values(), rows, strict=True):
            table.check(ids, values)


class Store:
    """The vectors of one server."""

    def __init__(self, rule: UpdateRule):
        """Args:
        rule: update rule of all vectors.
        """
        self._rule = rule
        self._vectors: dict[str, Vector] = {}
        self._lock = threading.Lock()

    def init(self, key: str, value: np.ndarray, decays: np.ndarray | None = None) -> None:
        """Creates a vector under `key`, with new slots; replaces an earlier one.

        Raises:
          UserError: the value is not a vector of floating-point numbers.
        """
        if value.ndim != 1 or not np.issubdtype(value.dtype, np.floating):
            raise UserError(
                f"init of {key!r} with {value.dtype} {list(value.shape)}: give a vector of floating-point numbers"
            )
        vector = Vector(value, self._rule, decays=decays)
        with self._lock:
            self._vectors[key] = vector

    def vector(self, key: str) -> Vector:
        """The vector under `key`; raises Refused if there is none."""
        with self._lock:
            if key not in self._vectors:
                raise Refused(f"there is no vector under {key!r}: init it first")
            return self._vectors[key]
