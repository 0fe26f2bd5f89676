"""The only exchange inside a tower: a sum over the towers, each on its own device.

Every tower runs the same traced graph, so every tower runs the same exchanges. A collective finds its counterparts
by the group key (which towers) and the instance key (which exchange of the tower). It works on logical CPU devices
as over NCCL, and holds no thread while it waits. Where one graph has all towers, it is replaced by an addition
(`towers.together.traced_together`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import tensorflow as tf

from towers.launch_order import LaunchOrder

# Groups of one process need different keys, even on the same devices. tf.distribute counts its keys from 1.
_next_group_key = itertools.count(1_000_000)


@dataclasses.dataclass
class TowerExchange:
    """Sums tensors over `num_towers` towers that run the same graph at the same time.

    Attributes:
      num_towers: number of towers.
      group_key: says which devices take part: one of each tower.
      new_group_key: makes keys for the towers' other devices; the same in all processes that have such towers
        (with a counter in each process, keys would agree only by luck).
      order: the order in which all towers launch their exchanges; None on CPUs, where any order works.
      hint: 'nccl' for whole GPUs, which TensorFlow would not choose by itself; 'auto' for its own ring.
    """

    num_towers: int
    group_key: int = dataclasses.field(default_factory=lambda: next(_next_group_key))
    new_group_key: Callable[[], int] = functools.partial(next, _next_group_key)
    order: LaunchOrder | None = None
    hint: str = "auto"
    _instances: itertools.count = dataclasses.field(default_factory=lambda: itertools.count(1))

    def again(self) -> "TowerExchange":
        """A new exchange of the same towers, counting from 1: one for each tower that is traced by itself."""
        order = None if self.order is None else LaunchOrder()
        return TowerExchange(self.num_towers, self.group_key, self.new_group_key, order, self.hint)

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """The sum of `value` (same shape on every tower) over all towers, on every tower. No gradient."""
        if self.order is None:
            return self._sum(value)
        return self.order.after_others(lambda: self._sum(value))

    def when_all_are_done(self, tensors):
        """The same tensors after all exchanges of a tower: later collectives can't be launched between those."""
        return tensors if self.order is None else self.order.when_all_are_done(tensors)

    def _sum(self, value: tf.Tensor) -> tf.Tensor:
        # CollectiveReduceV2 never returns between logical devices of one process (TensorFlow 2.21). This first
        # version, which has its group in attributes, does.
        return tf.raw_ops.CollectiveReduce(
            input=value,
            group_size=self.num_towers,
            group_key=self.group_key,
            instance_key=next(self._instances),
            merge_op="Add",
            final_op="Id",
            subdiv_offsets=[0],
            communication_hint=self.hint,
        )
