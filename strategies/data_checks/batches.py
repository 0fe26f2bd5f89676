"""Reads a dataset's elements as `Batch`es with checked weights, and raises errors that a user understands."""

import itertools
from collections.abc import Iterator

import tensorflow as tf

from strategies.data_checks.data_errors import readable_input
from strategies.data_checks.first_batches import ARE_BELOW_0
from towers.devices import HOST
from towers.input.open_batches import OpenBatches
from towers.task import Batch, as_batch


def as_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset with `Batch`es as elements. Reading a batch with a weight below 0 raises an error."""
    if not isinstance(dataset.element_spec, Batch):
        dataset = dataset.map(lambda *parts: as_batch(parts if len(parts) > 1 else parts[0]))
    return dataset.map(_with_checked_weights) if _weights_of(dataset.element_spec) else dataset


def _weights_of(batch: Batch) -> list:
    """The dense tensors of a batch's weights that can be below 0, or their specs."""
    found = [one for one in tf.nest.flatten(batch.weights) if isinstance(one, tf.Tensor | tf.TensorSpec)]
    return [one for one in found if one.dtype.is_floating or (one.dtype.is_integer and not one.dtype.is_unsigned)]


@tf.autograph.experimental.do_not_convert
def _with_checked_weights(batch: Batch) -> Batch:
    # NaN is not below 0: a step with a NaN weight is reported as not finite.
    are_below = tf.reduce_any([tf.reduce_any(weights < 0) for weights in _weights_of(batch)])
    tf.debugging.Assert(~are_below, [f"weights {ARE_BELOW_0}"])
    return batch


def readable_batches(dataset: tf.data.Dataset, num_batches: int | None) -> Iterator[Batch]:
    """The batches of an evaluation, or the first `num_batches`.

    Raises:
      UserError: the input pipeline failed.
    """
    with tf.device(HOST):
        batches = OpenBatches(iter(dataset if num_batches is None else dataset.take(num_batches)))
    for index in itertools.count():
        with readable_input("eval", f"batch {index}"), tf.device(HOST):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
