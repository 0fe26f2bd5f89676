"""Sums over the replicas of a tf.distribute strategy. Call these inside `strategy.run`."""

from collections.abc import Sequence

import tensorflow as tf

from strategies.wire_precisions import WIRE_PRECISIONS
from towers import gradients, packing


class ReplicaExchange:
    """Sums tensors over all replicas by the strategy's own all-reduce."""

    def __init__(self, wire_precision: str = "float32"):
        """Args:
        wire_precision: number format in which float32 gradients are sent, a key of WIRE_PRECISIONS.
        """
        self._wire = WIRE_PRECISIONS[wire_precision]

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Each tensor's sum over the replicas, in its own precision; tensors of one dtype share an exchange."""
        found: list[tf.Tensor] = list(values)
        for dtype in dict.fromkeys(value.dtype for value in values):
            indices = [index for index, value in enumerate(values) if value.dtype == dtype]
            own = [values[index] for index in indices]
            (vector,) = _all_reduced([packing.joined(own)])
            for index, part in zip(indices, packing.parted(vector, own), strict=True):
                found[index] = part
        return found

    def sum_gradients(self, own: Sequence[gradients.Gradient]) -> list[gradients.Gradient]:
        """The gradients' sums over the replicas. Sparse ones stay sparse and may repeat rows."""
        sent = [self._on_wire(gradient) for gradient in own]
        return [
            gradients.map_values(lambda values, dtype=mine.dtype: tf.cast(values, dtype), summed)
            for mine, summed in zip(own, _all_reduced(sent), strict=True)
        ]

    def _on_wire(self, gradient: gradients.Gradient) -> gradients.Gradient:
        if self._wire is None or gradient.dtype != tf.float32 or isinstance(gradient, tf.IndexedSlices):
            return gradient
        return tf.cast(gradient, self._wire)


def _all_reduced(values: list) -> list:
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return values
    # The strategy reads each value's device, and an argument of a graph has none.
    placed = [gradients.map_values(tf.identity, value) for value in values]
    found = {}
    # The strategy packs the values of a call, which requires a single dtype.
    for dtype in dict.fromkeys(value.dtype for value in placed):
        indices = [index for index, value in enumerate(placed) if value.dtype == dtype]
        found |= zip(indices, context.all_reduce("sum", [placed[index] for index in indices]), strict=True)
    return [found[index] for index in range(len(placed))]
