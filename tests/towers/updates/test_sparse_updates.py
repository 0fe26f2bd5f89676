"""Lazy updates: the named rows change as the dense rule changes them, and nothing else changes."""

import numpy as np
import pytest
import tensorflow as tf

from towers.updates.rules import SGD, Adam, Momentum
from towers.updates.sparse_updates import apply_lazily, only_rows

ROWS, WIDTH = 6, 3
RULES = {
    "sgd": SGD(),
    "sgd with decay": SGD(weight_decay=0.1),
    "momentum": Momentum(),
    "nesterov": Momentum(nesterov=True, weight_decay=0.1),
    "adam": Adam(),
    "adamw": Adam(weight_decay=0.1),
}


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


class Rows:
    """Variables of a table or of some of its rows."""

    def __init__(self, rule, value):
        self.rule, self.value = rule, tf.Variable(value)
        self.slots = {name: tf.Variable(tf.zeros_like(self.value)) for name in rule.slot_names}

    def values(self) -> dict[str, np.ndarray]:
        return {"value": self.value.numpy(), **{name: slot.numpy() for name, slot in self.slots.items()}}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_named_rows_change_as_if_they_were_alone(rule):
    """Three updates in float64, compared with those of the fused kernels on a variable of these rows."""
    start, ids = drawn(0, ROWS, WIDTH), [4, 1]
    table, alone = Rows(rule, start), Rows(rule, start[ids])
    for update in range(3):
        gradient, rate = drawn(update + 1, len(ids), WIDTH), tf.constant(0.25)
        count = tf.constant(update, tf.int64)
        slices = tf.IndexedSlices(tf.constant(gradient), tf.constant(ids, tf.int64))
        apply_lazily(rule, table.value, table.slots, slices, rate, count)
        rule.apply("", alone.value, alone.slots, tf.constant(gradient), rate, count)
    for name, expected in alone.values().items():
        found = table.values()[name]
        np.testing.assert_allclose(found[ids], expected, rtol=1e-12)
        others = np.delete(found, ids, 0)
        before = start if name == "value" else np.zeros_like(start)
        np.testing.assert_array_equal(others, np.delete(before, ids, 0))


def test_only_plain_sgd_is_exact_anyway():
    assert [name for name, rule in RULES.items() if only_rows(rule)] == ["sgd"]
