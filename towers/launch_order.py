"""Collectives of a graph that all devices launch in one order.

Over NCCL two collectives that one device launches in another order than the others wait for each other for ever. A
graph's executor launches what is ready: two exchanges that don't depend on each other in any order. So each one
waits for the one that was created before it; all workers create the same graph. TensorFlow orders
`CollectiveReduceV2` itself, which is stateful, but not `CollectiveReduce`. Its ordering tokens are resources,
which a pure tower must not capture; hence control inputs.
"""

from collections.abc import Callable

import tensorflow as tf


class LaunchOrder:
    """The order of the collectives that are created through it, in each graph by itself."""

    def __init__(self):
        self._last: tf.Tensor | None = None

    def after_others(self, launch: Callable[[], tf.Tensor]) -> tf.Tensor:
        """What `launch` returns: a new collective of the current graph, which waits for those before it."""
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
