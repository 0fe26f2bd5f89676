"""Gradients of the towers: sums, means and norms, dense or sparse."""

from collections.abc import Sequence

import tensorflow as tf

Gradient = tf.Tensor | tf.IndexedSlices


def add(gradients: Sequence[Gradient]) -> Gradient:
    """The sum of one parameter's gradients. IndexedSlices stay sparse when all of them are.

    Rows that several towers touched stand in the result more than once; `merged` makes them one.
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


def scale(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    """The gradient times a scalar."""
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def merged(gradient: Gradient) -> Gradient:
    """The same gradient with every row at most once, as norms and element-wise clipping need it."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def values_of(gradient: Gradient) -> tf.Tensor:
    """The numbers of a merged gradient, without those that are zero for being absent."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def map_values(function, gradient: Gradient) -> Gradient:
    """`function` on the numbers of a merged gradient; it must take 0 to 0."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def squared_norm(gradient: Gradient) -> tf.Tensor:
    """Sum of squares of a merged gradient, at least float32."""
    values = values_of(gradient)
    values = values if values.dtype == tf.float64 else tf.cast(values, tf.float32)
    return tf.reduce_sum(tf.square(values))


def global_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Euclidean norm over all of some merged gradients: a float32 scalar, summed in the widest of their types."""
    squares = [squared_norm(gradient) for gradient in gradients]
    widest = tf.float64 if any(square.dtype == tf.float64 for square in squares) else tf.float32
    return tf.cast(tf.sqrt(tf.add_n([tf.cast(square, widest) for square in squares])), tf.float32)
