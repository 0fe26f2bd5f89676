"""The sums over all workers of a (micro)batch, in modes that divide each batch between workers or replicas."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from towers import batch_stats, gradients
from towers.sums import add_to, scalars_of, with_scalars
from towers.tower import TowerResult


class WorkerSums(NamedTuple):
    """The sums over a (micro)batch.

    Attributes:
      towers: sums over all workers; only the gradients are this worker's own until the step's end.
      examples: int64 scalar, number of examples over all workers.
    """

    towers: TowerResult
    examples: tf.Tensor


def summed_except_gradients(
    own: TowerResult,
    state: Sequence[tf.Tensor],
    examples: tf.Tensor,
    sum_all: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]],
    *,
    is_first: tf.Tensor | bool,
    policy: str,
) -> WorkerSums:
    """Sums everything except the gradients in one exchange; the large gradients are exchanged once a step.

    Args:
      own: this worker's (or replica's) sums over its part of the (micro)batch.
      state: the state before, the same on all workers.
      examples: number of examples in this worker's part.
      sum_all: sums each of several tensors over all workers.
      is_first: whether this worker has tower 0.
      policy: one of `towers.batch_stats.POLICIES`.
    """
    changes = batch_stats.changes(state, own.new_state, own.weight, is_first=is_first, batch_stats=policy)
    summed = sum_all([*changes.values(), tf.cast(examples, tf.float32), *scalars_of(own)])
    of_all, (examples, *scalars) = summed[: len(changes)], summed[len(changes) :]
    result = with_scalars(own, scalars)
    new_state = batch_stats.changed(state, dict(zip(changes, of_all, strict=True)), result.weight, policy)
    # int32 would be in the host's memory, and a GPU's step would wait for it.
    return WorkerSums(result._replace(new_state=new_state), tf.cast(examples, tf.int64))


def added(sums: WorkerSums, more: WorkerSums, add: Callable[[Sequence], list] = gradients.add_each) -> WorkerSums:
    """`sums` plus those of the next microbatch; `add` as `towers.owners.Owners.add`."""
    return WorkerSums(add_to(sums.towers, more.towers, add), sums.examples + more.examples)
