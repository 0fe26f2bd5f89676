"""An update of a server's piece: of its part of the vector, and of its rows of the tables."""

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from towers.updates.composed_rules import check_elementwise
from towers.updates.rules import UpdateRule, everything
from towers.updates.sparse_updates import apply_lazily


def check_rule(rule: UpdateRule) -> None:
    """Raises UserError for a rule that needs whole matrices or names: servers hold pieces of a vector."""
    check_elementwise(
        rule,
        "strategy=ps: it needs whole matrices or their names, and servers hold pieces of one vector",
        "use sgd, momentum, nesterov, adam or adamw",
        named=False,
    )


def update_piece(
    rule: UpdateRule,
    value: tf.Variable,
    slots: Mapping[str, tf.Variable],
    decays: tf.Tensor | None,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    update: tf.Tensor,
) -> None:
    """Applies a rule to a piece. Weight decay comes first, and only where `decays` is 1.

    A piece contains several parameters, so only some elements decay, which the rule itself cannot know.

    Args:
      rule: the rule; it must work element by element.
      value: [n], the piece.
      slots: [n], its slots, by name.
      decays: [n], 1 for elements that decay and 0 for others, in the value's dtype; None if all decay.
      gradient: [n], in the value's dtype.
      rate: float32 scalar, learning rate.
      update: int64 scalar, number of updates before this one.
    """
    if rule.weight_decay:
        lost = tf.cast(rate, value.dtype) * tf.constant(rule.weight_decay, value.dtype)
        value.assign_sub(value * (lost if decays is None else decays * lost))
    dataclasses.replace(rule, weight_decay=0.0).apply("", value, slots, gradient, rate, update)


def update_rows(
    rule: UpdateRule,
    table: tf.Variable,
    slots: Mapping[str, tf.Variable],
    gradient: tf.IndexedSlices,
    rate: tf.Tensor,
    update: tf.Tensor,
    *,
    lazily: bool,
) -> None:
    """Applies a rule to rows of a table.

    Args:
      rule: the rule; it must work element by element, and its weight decay applies to the whole table.
      table: [rows, width].
      slots: [rows, width], by name.
      gradient: each row at most once, in the table's dtype.
      rate: float32 scalar, learning rate.
      update: int64 scalar, number of updates before this one.
      lazily: whether rows without a gradient remain unchanged, including slots and weight decay.
    """
    if lazily:
        apply_lazily(rule, table, slots, gradient, rate, update)
    else:
        decays_all = dataclasses.replace(rule, decays=everything) if rule.weight_decay else rule
        decays_all.apply("", table, slots, gradient, rate, update)
