"""Sums of values over the examples of a batch, with the examples' weights."""

import tensorflow as tf


def weighted_sum(values: tf.Tensor, weights: tf.Tensor | tuple) -> tuple[tf.Tensor, tf.Tensor]:
    """Weighted sum of float32 [N] `values`, and the sum of the weights; weights=() means 1 for each example."""
    if isinstance(weights, tuple):
        return tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32)
    weights = tf.cast(weights, tf.float32)
    return tf.reduce_sum(values * weights), tf.reduce_sum(weights)
