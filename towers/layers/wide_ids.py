"""Embedding layers that look their ids up as int64, for GPUs.

Keras compares ids with 0, and the gradient of a lookup reshapes them. TensorFlow's kernels for these operations
keep int32 in the host's memory, so the host would wait for int32 ids that are on a GPU. int64 ids stay on the GPU,
and give the same results.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

_KINDS = (keras.layers.Embedding, keras.layers.ReversibleEmbedding)


def lookups_of_wide_ids(model: keras.Model) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, attribute, function) for each Embedding layer that isn't a subclass."""
    # A replacement already in place, such as a lookup in rows of the table, gets the wide ids.
    return [
        (layer, name, functools.partial(_of_wide, getattr(layer, name)))
        for layer in model._flatten_layers()
        if type(layer) in _KINDS
        for name in ("call", "compute_mask")
    ]


def _of_wide(function: Callable, inputs, *others, **named):
    if isinstance(inputs, tf.Tensor) and inputs.dtype == tf.int32:
        inputs = tf.cast(inputs, tf.int64)
    return function(inputs, *others, **named)
