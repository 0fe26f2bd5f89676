"""Keras losses and metrics undivided: sums whose quotient is Keras's number, for one output or several."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.errors import UserError
from towers.task import WeightedValue

# Reductions that are a sum divided by a sum, so that parts of a batch add up.
_DIVIDED_BY_VALUES = ("sum_over_batch_size", "mean")
_DIVIDED_BY_WEIGHTS = "mean_with_sample_weight"

MetricFunction = Callable[[Any, Any], Any]


class Term(NamedTuple):
    """The loss of one output: `scale` times `loss` of (labels, output), with weights or ()."""

    loss: keras.losses.Loss
    scale: float
    labels: Any
    output: Any
    weights: Any


def checked_loss(loss: Any) -> keras.losses.Loss | None:
    """A Keras loss whose reduction is a division of sums.

    Raises:
      UserError: it is something else.
    """
    if loss is None:
        return None
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if not isinstance(loss, keras.losses.Loss):
        raise UserError(
            f"loss {getattr(loss, '__name__', loss)!r}: an instance of a Keras loss is needed; "
            "pass for example keras.losses.MeanSquaredError()"
        )
    if loss.reduction not in (*_DIVIDED_BY_VALUES, _DIVIDED_BY_WEIGHTS):
        raise UserError(
            f"loss {loss.name}: reduction={loss.reduction!r} depends on how many examples meet in one place; "
            "use reduction='sum_over_batch_size' or 'mean_with_sample_weight'"
        )
    return loss


def check_metric(function: Any) -> None:
    if isinstance(function, keras.metrics.Metric) or not callable(function):
        raise UserError(
            f"metric {getattr(function, 'name', function)!r}: "
            "a function of (labels, outputs) that gives a value for each example is needed; "
            "pass for example keras.metrics.sparse_categorical_accuracy"
        )


def _values(term: Term) -> tf.Tensor:
    """The loss's undivided values, float32 [N] or [N, ...]."""
    dtype = term.loss.dtype
    values = term.loss.call(tf.cast(term.labels, dtype), tf.cast(term.output, dtype))
    if values.shape.rank == 0:
        raise UserError(
            f"loss {term.loss.name}: gives one number for a batch; its call() must give one for each example"
        )
    return tf.cast(values, tf.float32)


def _mask(output: Any) -> tf.Tensor | None:
    """Which places of an output count, as a Masking or Embedding layer said; Keras hangs it on the tensor."""
    mask = getattr(output, "_keras_mask", None)
    return None if mask is None else tf.cast(mask, tf.float32)


def _fitted(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Weights [N], [N, 1] or as `values` with the dimensions of `values`, to multiply."""
    weights = tf.cast(weights, tf.float32)
    while weights.shape.rank > values.shape.rank and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, axis=-1)
    while weights.shape.rank < values.shape.rank:
        weights = tf.expand_dims(weights, axis=-1)
    return weights


def loss_sums(term: Term) -> tuple[tf.Tensor, tf.Tensor]:
    """Sum of one loss's values and what Keras divides it by.

    keras.losses.Loss.__call__: 'sum_over_batch_size' divides by the number of values that the mask leaves,
    whatever the sample weights; 'mean_with_sample_weight' divides by the sum of mask times weights. (Weights
    [N] of examples with several values count once a value here; Keras takes none, and [N, 1] once.)
    """
    values = _values(term)
    mask = _mask(term.output)
    weights = tf.ones_like(values) if mask is None else tf.ones_like(values) * _fitted(values, mask)
    divisor = tf.reduce_sum(weights)
    if not is_empty(term.weights):
        weights = weights * _fitted(values, term.weights)
        if term.loss.reduction == _DIVIDED_BY_WEIGHTS:
            divisor = tf.reduce_sum(weights)
    return tf.reduce_sum(values * weights), divisor


def loss_sums_by_example(term: Term) -> tuple[tf.Tensor, tf.Tensor]:
    """Sum over the examples of the mean of each one's values, and the number (or weight) of examples."""
    values = _values(term)
    values_an_example = tf.cast(tf.reduce_prod(tf.shape(values)[1:]), tf.float32)
    num_examples = tf.cast(tf.shape(values)[0], tf.float32)
    if is_empty(term.weights):
        return tf.reduce_sum(values) / values_an_example, num_examples
    weights = _fitted(values, term.weights)
    total = tf.reduce_sum(values * weights) / values_an_example
    is_by_weight = term.loss.reduction == _DIVIDED_BY_WEIGHTS
    return total, tf.reduce_sum(weights) if is_by_weight else num_examples


def check_common_divisor(terms: Sequence[Term]) -> None:
    """Several losses need one divisor.

    Raises:
      UserError: a mask, or weights with a reduction that divides by them in some losses but not in all.
    """
    if any(_mask(term.output) is not None for term in terms):
        raise UserError(
            "a masked output beside others: each loss would have a divisor of its own; "
            "leave the mask out and give weights [N, T] instead"
        )
    weighted = [term for term in terms if not is_empty(term.weights)]
    by_weight = [term for term in weighted if term.loss.reduction == _DIVIDED_BY_WEIGHTS]
    same = all(term.weights is terms[0].weights for term in terms)
    if by_weight and not (len(by_weight) == len(terms) and same and terms[0].weights.shape.rank == 1):
        raise UserError(
            f"loss {by_weight[0].loss.name}: 'mean_with_sample_weight' beside other losses "
            "needs the same weights [N] and reduction for all; use reduction='sum_over_batch_size'"
        )


def metric_sums(function: MetricFunction, labels: Any, output: Any, weights: Any) -> WeightedValue:
    """Weighted sum of a metric's values, float32, and of their weights."""
    if isinstance(output, tf.Tensor) and output.dtype.is_floating:
        mask, output = _mask(output), tf.cast(output, tf.float32)
    else:
        mask = None
    values = tf.cast(function(labels, output), tf.float32)
    counted = tf.ones_like(values) if mask is None else tf.ones_like(values) * _fitted(values, mask)
    if not is_empty(weights):
        counted = counted * _fitted(values, weights)
    return WeightedValue(tf.reduce_sum(values * counted), tf.reduce_sum(counted))


def is_empty(value: Any) -> bool:
    return isinstance(value, tuple) and not value
