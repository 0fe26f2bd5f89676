"""Strategies whose runtime is tf.distribute's."""
