"""Makes all devices launch the collectives of a graph in the same order.

Over NCCL two collectives deadlock if one device launches them in another order than the others. A graph's executor
launches whatever is ready, so two independent exchanges start in any order. Therefore each one waits for the one
that was created before it; all workers create the same graph. TensorFlow orders `CollectiveReduceV2` itself, which
is stateful, but not `CollectiveReduce`. Its ordering tokens are resources, which a pure tower must not capture;
hence control inputs.
"""

from collections.abc import Callable

import tensorflow as tf


class LaunchOrder:
    """Orders the collectives that are created through it, separately in each graph."""

    def __init__(self):
        self._last: tf.Tensor | None = None

    def after_others(self, launch: Callable[[], tf.Tensor]) -> tf.Tensor:
        """The result of `launch`, which creates a collective in the current graph, after the earlier ones."""
        with tf.control_dependencies(self._waited_for()):
            self._last = launch()
        return self._last

    def when_all_are_done(self, tensors):
        """A structure of tensors with the same values, after all collectives of the current graph."""
        waited_for = self._waited_for()
        if not waited_for:
            return tensors
        with tf.control_dependencies(waited_for):
            return tf.nest.map_structure(tf.identity, tensors, expand_composites=True)

    def _waited_for(self) -> list[tf.Tensor]:
        is_here = self._last is not None and self._last.graph is tf.compat.v1.get_default_graph()
        return [self._last] if is_here else []
