"""Keras losses and metrics as (sum, divisor), whose quotient is Keras's value; for one output or several."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.errors import UserError
from towers.task import WeightedValue

# Reductions that divide one sum by another. Both sums of a batch are the totals of those of its parts.
_DIVIDED_BY_VALUES = ("sum_over_batch_size", "mean")
_DIVIDED_BY_WEIGHTS = "mean_with_sample_weight"

_SPARSE = "SparseCategoricalCrossentropy"
_OF_EQUAL_SHAPES = (
    "MeanSquaredError",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredLogarithmicError",
    "Huber",
    "LogCosh",
    "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy",
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "KLDivergence",
    "Poisson",
    "CosineSimilarity",
)

MetricFunction = Callable[[Any, Any], Any]


class Term(NamedTuple):
    """The loss of one output: scale * loss(labels, output, weights); weights is () if there are none."""

    loss: keras.losses.Loss
    scale: float
    labels: Any
    output: Any
    weights: Any


def checked_loss(loss: Any) -> keras.losses.Loss | None:
    """`loss` as an instance of a Keras loss, from an instance or Keras's name of one; None stays None.

    Raises:
      UserError: `loss` is not a Keras loss, has a `__call__` of its own, or its value for a batch is not a
        quotient of two sums over the examples.
    """
    if loss is None:
        return None
    if isinstance(loss, str):
        loss = _named_loss(loss)
    if not isinstance(loss, keras.losses.Loss):
        raise UserError(
            f"loss {getattr(loss, '__name__', loss)!r}: must be an instance of a Keras loss; "
            "pass for example keras.losses.MeanSquaredError(), or a subclass of keras.losses.Loss with a "
            "call() of your own"
        )
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        raise UserError(
            f"loss {loss.name}: {type(loss).__name__} has a __call__() of its own, which no run calls, because it "
            "reduces the whole batch; write call(labels, outputs), which returns a value for each example, instead"
        )
    if isinstance(loss, keras.losses.Circle):
        raise UserError(
            f"loss {loss.name}: it compares the examples of a batch with each other, so it depends on how the "
            "batch is divided over towers; use a loss that has a value for each example"
        )
    if loss.reduction not in (*_DIVIDED_BY_VALUES, _DIVIDED_BY_WEIGHTS):
        raise UserError(
            f"loss {loss.name}: reduction={loss.reduction!r} depends on how the batch is divided over towers; "
            "use reduction='sum_over_batch_size' or 'mean_with_sample_weight'"
        )
    return loss


def _named_loss(name: str) -> Any:
    try:
        found = keras.losses.get(name)
    except ValueError as error:
        raise UserError(
            f"loss {name!r} is unknown to Keras: pass an instance, for example keras.losses.MeanSquaredError()"
        ) from error
    if isinstance(found, keras.losses.Loss):
        return found
    # 'mse' and the like are names of functions; each has a class of a similar name.
    wanted = found.__name__.replace("_", "").lower()
    classes = {one.lower(): one for one in dir(keras.losses) if isinstance(getattr(keras.losses, one), type)}
    return getattr(keras.losses, classes[wanted])() if wanted in classes else found


def check_metric(function: Any) -> None:
    """Raises UserError if `function` is a Keras metric object or can't be called."""
    if isinstance(function, keras.metrics.Metric) or not callable(function):
        raise UserError(
            f"metric {getattr(function, 'name', function)!r}: "
            "must be a function of (labels, outputs) that returns a value for each example; "
            "pass for example keras.metrics.sparse_categorical_accuracy"
        )


def _values(term: Term) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Unreduced values of the loss, float32 [N] or [N, ...], and their mask like `_mask` (for `ignore_class`)."""
    _check_given(term.labels, f"loss {type(term.loss).__name__}", term.output)
    _check_labels(term)
    # Keras would round float64 outputs, which verification compares, to float32.
    dtype = tf.float64 if term.output.dtype == tf.float64 else term.loss.dtype
    labels = _of_equal_rank(tf.cast(term.labels, dtype), term.output)
    values = term.loss.call(labels, tf.cast(term.output, dtype))
    check_by_example(values, term.output, f"loss {term.loss.name}: call()")
    return tf.cast(values, tf.float32), _mask(values)


def _of_equal_rank(labels: Any, output: Any) -> Any:
    """Labels [N] for outputs [N, 1] as [N, 1], and the other way round, as Keras gives them to a loss.

    Otherwise a user's own `labels - output` would be [N, N].
    """
    if not (tf.is_tensor(labels) and tf.is_tensor(output)) or None in (labels.shape.rank, output.shape.rank):
        return labels
    if labels.shape.rank + 1 == output.shape.rank and output.shape[-1] == 1:
        return tf.expand_dims(labels, -1)
    if labels.shape.rank == output.shape.rank + 1 and labels.shape[-1] == 1:
        return tf.squeeze(labels, -1)
    return labels


def check_by_example(values: Any, output: Any, what: str) -> None:
    """Checks that `values` is a tensor with one entry per example in dimension 0, like `output`.

    What NumPy computes is not part of a graph. If a function took the mean over the examples of each part, these
    means would be averaged over the parts, whatever their sizes.

    Args:
      values: what a loss or metric returned.
      output: the model's output, or any structure of outputs.
      what: which function returned them, for messages.

    Raises:
      UserError: `values` is not a tensor, is a single number, or has another length in dimension 0.
    """
    if not tf.is_tensor(values):
        raise UserError(
            f"{what} returns a {type(values).__name__}: must return a tensor with a value for each example; "
            "compute it by keras.ops or TensorFlow, not by NumPy"
        )
    shape = tf.nest.flatten(output)[0].shape
    num_examples, fix = shape[:1], "remove its mean or sum over the examples"
    if shape.rank == 1:  # Keras's own losses and metrics take the mean over the last dimension
        fix = f"let the model return [N, 1] instead of [N], or {fix}"
    if values.shape.rank == 0:
        found = "one number for the batch"
    elif values.shape.rank is not None and values.shape[0] is not None and values.shape[:1] != num_examples:
        found = f"shape {list(values.shape)}"
    else:
        return
    raise UserError(f"{what} returns {found}: must return one value for each example, dimension 0; {fix}")


def _check_given(labels: Any, what: str, output: Any) -> None:
    """Raises UserError if one of several outputs has a loss or metric and no labels."""
    if labels is None or is_empty(labels):
        raise UserError(
            f"{what}: there are no labels for its outputs {_shape(output)}: pass labels for each output that has "
            "a loss or metric"
        )


def _check_labels(term: Term) -> None:
    """Raises UserError for labels that Keras would compare with the output by broadcasting, or not at all."""
    labels, output = tf.convert_to_tensor(term.labels), tf.convert_to_tensor(term.output)
    name = type(term.loss).__name__
    came = f"loss {name}: labels {_shape(labels)} for outputs {_shape(output)}"
    if None in (labels.shape.rank, output.shape.rank):
        return
    if name == _SPARSE:
        if labels.shape.rank == output.shape.rank and labels.shape[-1] not in (1, None):
            raise UserError(
                f"{came}: it takes class numbers {_shape(output[..., 0])}; pass argmax of one-hot labels, or use "
                "CategoricalCrossentropy"
            )
        if labels.dtype.is_floating and tf.executing_eagerly() and bool(tf.reduce_any(labels != tf.round(labels))):
            raise UserError(f"{came}: it takes class numbers, and these labels are fractions; use another loss")
    if name in _OF_EQUAL_SHAPES and _significant(labels) != _significant(output):
        raise UserError(f"{came}: it compares equal shapes; change the labels' shape or the model's last layer")


def _significant(tensor: tf.Tensor) -> list[int | None]:
    """The dimensions after that of the examples, without trailing 1s."""
    found = list(tensor.shape[1:])
    while found and found[-1] == 1:
        found.pop()
    return found


def _shape(tensor: tf.Tensor) -> str:
    return f"[{', '.join(['N', *map(str, tensor.shape[1:])])}]"


def _mask(output: Any) -> tf.Tensor | None:
    """float32 mask that Keras attached to a tensor (an output of a Masking or Embedding layer); None for none."""
    mask = getattr(output, "_keras_mask", None)
    return None if mask is None else tf.cast(mask, tf.float32)


def _fitted(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Weights of shape [N], [N, 1] or that of `values`, reshaped to broadcast over `values`."""
    weights = tf.cast(weights, tf.float32)
    while weights.shape.rank > values.shape.rank and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, axis=-1)
    if weights.shape.rank is not None and weights.shape.rank > values.shape.rank:
        raise UserError(
            f"weights {_shape(weights)} for values {_shape(values)} of a loss or metric: "
            "give one weight for each example, or for each value"
        )
    while weights.shape.rank < values.shape.rank:
        weights = tf.expand_dims(weights, axis=-1)
    return weights


def loss_sums(term: Term) -> tuple[tf.Tensor, tf.Tensor]:
    """(sum of mask * weights * values, the divisor that Keras uses) of one loss.

    The divisor is that of keras.losses.Loss.__call__: for 'sum_over_batch_size' the sum of the mask over the
    values, whatever the sample weights; for 'mean_with_sample_weight' the sum of mask * weights over the values.
    (Where examples have several values, weights [N] count once for each value here. Keras refuses weights [N]
    there, and counts [N, 1] once for each example.)
    """
    values, own_mask = _values(term)
    weights = tf.ones_like(values)
    for mask in (_mask(term.output), own_mask):
        if mask is not None:
            weights = weights * _fitted(values, mask)
    divisor = tf.reduce_sum(weights)
    if not is_empty(term.weights):
        weights = weights * _fitted(values, term.weights)
        if term.loss.reduction == _DIVIDED_BY_WEIGHTS:
            divisor = tf.reduce_sum(weights)
    return tf.reduce_sum(values * weights), divisor


def loss_sums_by_example(term: Term) -> tuple[tf.Tensor, tf.Tensor]:
    """(sum over the examples of weight * mean of the example's values, divisor).

    The divisor is the sum of the weights for 'mean_with_sample_weight', else the number of examples.
    """
    values, mask = _values(term)
    if mask is not None:
        raise UserError(
            f"loss {term.loss.name} has ignore_class and is one of several: each loss would have its own divisor; "
            "omit ignore_class and pass weights [N, T] instead"
        )
    values_an_example = tf.cast(tf.reduce_prod(tf.shape(values)[1:]), tf.float32)
    num_examples = tf.cast(tf.shape(values)[0], tf.float32)
    if is_empty(term.weights):
        return tf.reduce_sum(values) / values_an_example, num_examples
    weights = _fitted(values, term.weights)
    total = tf.reduce_sum(values * weights) / values_an_example
    is_by_weight = term.loss.reduction == _DIVIDED_BY_WEIGHTS
    return total, tf.reduce_sum(weights) if is_by_weight else num_examples


def check_common_divisor(terms: Sequence[Term]) -> None:
    """Checks that several losses have the same divisor.

    Raises:
      UserError: an output has a mask, or some loss divides by weights and not all have its reduction and weights.
    """
    if any(_mask(term.output) is not None for term in terms):
        raise UserError(
            "one of several outputs has a mask: each loss would have its own divisor; "
            "remove the mask and pass weights [N, T] instead"
        )
    weighted = [term for term in terms if not is_empty(term.weights)]
    by_weight = [term for term in weighted if term.loss.reduction == _DIVIDED_BY_WEIGHTS]
    same = all(term.weights is terms[0].weights for term in terms)
    if by_weight and not (len(by_weight) == len(terms) and same and terms[0].weights.shape.rank == 1):
        raise UserError(
            f"loss {by_weight[0].loss.name}: with several losses, 'mean_with_sample_weight' needs "
            "the same weights [N] and reduction for all; use reduction='sum_over_batch_size'"
        )


def metric_sums(name: str, function: MetricFunction, labels: Any, output: Any, weights: Any) -> WeightedValue:
    """(sum of weights * values of a metric, sum of the weights), float32.

    Raises:
      UserError: the metric does not return a tensor with a value for each example.
    """
    if isinstance(output, tf.Tensor) and output.dtype.is_floating:
        mask, output = _mask(output), tf.cast(output, tf.float32)
    else:
        mask = None
    _check_given(labels, f"metric {name!r}", output)
    values = function(_of_equal_rank(labels, output), output)
    check_by_example(values, output, f"metric {name!r}")
    values = tf.cast(values, tf.float32)
    counted = tf.ones_like(values) if mask is None else tf.ones_like(values) * _fitted(values, mask)
    if not is_empty(weights):
        counted = counted * _fitted(values, weights)
    return WeightedValue(tf.reduce_sum(values * counted), tf.reduce_sum(counted))


def is_empty(value: Any) -> bool:
    return isinstance(value, tuple) and not value
