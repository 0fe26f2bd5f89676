"""Updates of a table from the gradients of some of its rows: exact, or lazy.

A batch names few rows of a table. But Momentum and Adam also move the other rows, by their momenta, and weight
decay shrinks them. So the exact update takes time for the whole table. A lazy update, like LazyAdam of TensorFlow
Addons, changes only the named rows: it is faster, but gives other numbers.
"""

import tensorflow as tf

from towers.updates.rules import Slots, UpdateRule

DENSE, LAZY = "dense", "lazy"
SPARSE_UPDATES = (DENSE, LAZY)


def only_rows(rule: UpdateRule) -> bool:
    """Whether the exact update changes only rows with a gradient, so that lazy and exact updates are equal."""
    return not rule.slot_names and not rule.weight_decay


def apply_lazily(
    rule: UpdateRule,
    table: tf.Variable,
    slots: Slots,
    gradient: tf.IndexedSlices,
    rate: tf.Tensor,
    update: tf.Tensor,
) -> None:
    """Updates only the rows of a gradient and their slots; weight decay of these rows comes first.

    It consists of several operations, so the caller must hold a lock.

    Args:
      rule: the rule; it must work element by element. Its weight decay applies to this table.
      table: [rows, width].
      slots: [rows, width], by name.
      gradient: each row at most once, in the table's dtype.
      rate: float32 scalar, learning rate.
      update: int64 scalar, number of updates before this one.
    """
    rows = gradient.indices
    value = tf.gather(table, rows)
    if rule.weight_decay:
        value -= value * (tf.cast(rate, value.dtype) * tf.constant(rule.weight_decay, value.dtype))
    held = {name: tf.gather(slots[name], rows) for name in rule.slot_names}
    value, held = rule.changed(value, held, gradient.values, rate, update)
    table.scatter_update(tf.IndexedSlices(value, rows))
    for name, found in held.items():
        slots[name].scatter_update(tf.IndexedSlices(found, rows))
