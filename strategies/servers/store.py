"""The vectors of one server, by key: each with its slots and its update rule, changed by one update at a time."""

import dataclasses
import threading
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from strategies.servers.wire import Refused
from towers.errors import UserError
from towers.updates.rules import UpdateRule

_HOST = "/device:CPU:0"


def check_rule(rule: UpdateRule) -> None:
    """Raises UserError for a rule that needs whole matrices: a server holds pieces of a vector."""
    if not rule.elementwise:
        raise UserError(
            f"{type(rule).__name__} with strategy=ps: it needs whole matrices, and servers hold pieces of "
            "parameters; use sgd, momentum, nesterov, adam or adamw"
        )


class Vector:
    """One key's piece on this server.

    Attributes:
      version: number of updates applied; `set` assigns it.
    """

    def __init__(self, value: np.ndarray, rule: UpdateRule, *, decays: np.ndarray | None = None):
        """Args:
        value: [n], floating.
        rule: update rule; it must work element by element.
        decays: [n] bool, the elements that the rule's weight decay applies to; None for all.
        """
        check_rule(rule)
        self._lock = threading.Lock()
        # This class applies the weight decay, because a vector of many parameters decays in some elements only.
        self._decay = rule.weight_decay
        self._rule = dataclasses.replace(rule, weight_decay=0.0)
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

    def slots(self) -> dict[str, np.ndarray]:
        """Copies of the slots, by name."""
        with self._lock:
            return {name: slot.numpy() for name, slot in self._slots.items()}

    def set(self, value: np.ndarray, slots: Mapping[str, np.ndarray], version: int) -> None:
        """Assigns the value, the slots and the version."""
        with self._lock:
            self._value.assign(value)
            for name, slot in self._slots.items():
                slot.assign(slots[name])
            self.version = version

    def apply(self, gradient: np.ndarray, rate: float, *, since: int | None = None, aware: bool = False) -> int:
        """Applies one update.

        Args:
          gradient: [n].
          rate: learning rate.
          since: version that the gradient was computed from; None for the current one.
          aware: whether the rate is divided by the staleness (Zhang et al. 2016, "Staleness-aware async-SGD").

        Returns:
          The staleness: the number of other updates applied since version `since`.

        Raises:
          Refused: the gradient has another length than the value.
        """
        if gradient.shape != self._value.shape:
            raise Refused(f"a gradient of {gradient.size} numbers for a piece of {self._value.shape[0]} numbers")
        with self._lock:
            staleness = 0 if since is None else self.version - since
            rate = rate / max(1, staleness) if aware else rate
            with tf.device(_HOST):
                self._apply(
                    tf.constant(gradient), tf.constant(rate, tf.float32), tf.constant(self.version, tf.int64)
                )
            self.version += 1
            return staleness

    def _apply(self, gradient, rate, update):
        # Eager: calling a tf.function of these few operations takes 17 times as long (366 us compared with 22 us).
        if self._decay:
            lost = tf.cast(rate, self._value.dtype) * tf.constant(self._decay, self._value.dtype)
            self._value.assign_sub(self._value * (lost if self._decays is None else self._decays * lost))
        self._rule.apply("", self._value, self._slots, gradient, rate, update)


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
        """Makes a vector under `key`, with new slots; it replaces an earlier one.

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
