"""Gradients of the towers: sums, means and norms, dense or sparse."""

from collections.abc import Sequence

import tensorflow as tf

Gradient = tf.Tensor | tf.IndexedSlices


def add(gradients: Sequence[Gradient]) -> Gradient:
    """The sum of one parameter's gradients. The sum is IndexedSlices if all of them are.

    The result repeats a row that several towers touched; `merged` adds up such repetitions.
    """
    if len(gradients) == 1:
        return gradients[0]
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return tf.IndexedSlices(
            values=tf.concat([gradient.values for gradient in gradients], 0),
            indices=tf.concat([gradient.indices for gradient in gradients], 0),
            dense_shape=gradients[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients])


def add_each(per_tower: Sequence[Sequence[Gradient]]) -> list[Gradient]:
    """For each parameter the sum of its gradients, given one list of gradients for each tower."""
    return [add(of_parameter) for of_parameter in zip(*per_tower, strict=True)]


def divided(gradient: Gradient, divisor: tf.Tensor) -> Gradient:
    """The gradient divided by a scalar, in the gradient's own precision; zeros if the scalar is 0."""

    def quotient(values):
        return tf.math.divide_no_nan(values, tf.cast(divisor, values.dtype))

    return map_values(quotient, gradient)


def merged(gradient: Gradient) -> Gradient:
    """The same gradient with each row at most once, which norms and element-wise clipping need."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, segments = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, segments, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def values_of(gradient: Gradient) -> tf.Tensor:
    """The values of a gradient; for a sparse gradient, only the values of its rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def map_values(function, gradient: Gradient) -> Gradient:
    """Applies `function` to the values of a gradient. It must map 0 to 0: absent rows of a sparse one stay 0."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def squared_norm(gradient: Gradient) -> tf.Tensor:
    """Sum of squares of a merged gradient, at least float32."""
    values = values_of(gradient)
    values = values if values.dtype == tf.float64 else tf.cast(values, tf.float32)
    return tf.reduce_sum(tf.square(values))


def global_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Euclidean norm over all elements of these merged gradients: a float64 scalar."""
    return norm_of_squares([squared_norm(gradient) for gradient in gradients])


def norm_of_squares(squares: Sequence[tf.Tensor]) -> tf.Tensor:
    """The global norm, from the gradients' sums of squares: a float64 scalar.

    In float32 the norm's rounding error, which depends on how a mode divides the gradients, would be in every
    clipped gradient.
    """
    return tf.sqrt(tf.add_n([tf.cast(square, tf.float64) for square in squares]))
