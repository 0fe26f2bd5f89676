"""The one exchange inside a tower: a sum over the towers, each on its own device.

Every tower runs the same traced graph, so every tower reaches the same exchanges; the collective finds
its partners by the group (who takes part) and the instance (which exchange of the tower it is). It works
on logical CPU devices as it does over NCCL, and waits without holding a thread.
"""

import dataclasses
import itertools

import tensorflow as tf

# Two groups of one process must not share a key, even on the same devices; tf.distribute counts its own from 1.
_next_group_key = itertools.count(1_000_000)


@dataclasses.dataclass
class TowerExchange:
    """Sums tensors over `num_towers` towers that run the same graph at the same time."""

    num_towers: int
    group_key: int = dataclasses.field(default_factory=lambda: next(_next_group_key))
    _instances: itertools.count = dataclasses.field(default_factory=lambda: itertools.count(1))

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """The sum of `value` (same shape on every tower) over all towers, on every tower. No gradient."""
        # The second version of this operation never returns between logical devices of one process (seen on
        # TensorFlow 2.21); the first has its group in attributes and does.
        return tf.raw_ops.CollectiveReduce(
            input=value,
            group_size=self.num_towers,
            group_key=self.group_key,
            instance_key=next(self._instances),
            merge_op="Add",
            final_op="Id",
            subdiv_offsets=[0],
            communication_hint="auto",
        )
