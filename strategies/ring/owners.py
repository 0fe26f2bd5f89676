"""Where the gradients of a ring's workers meet: on every worker, on its devices, or each part on its owner.

In each class, `of_towers` is where the gradients of a worker's own towers meet first.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from strategies.ring.exchange.collectives import WorkerExchange
from towers import gradients, packing
from towers.gradients import Gradient
from towers.owners import CURRENT_DEVICE, CurrentDevice, ManyOwners, Slices


class EveryWorker(CurrentDevice):
    """Implements `towers.owners.Owners`: once a step, every worker gets the sums over all workers."""

    of_towers = CURRENT_DEVICE

    def __init__(self, exchange: WorkerExchange, shapes: Sequence[tf.TensorShape]):
        """Args:
        exchange: sums over the workers.
        shapes: shapes of the parameters.
        """
        self._exchange, self._shapes = exchange, shapes

    def meet(self, kept):
        if not self._exchange.sends_any_number_of_rows:
            kept = dense(kept, self._shapes)
        return self._exchange.sum_gradients(kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counterparts(ManyOwners):
    """`ManyOwners` on each worker: once a step, each device gets the sums over its counterparts on all workers.

    Attributes:
      exchange: sums over the workers.
    """

    exchange: WorkerExchange

    @property
    def of_towers(self) -> ManyOwners:
        return self

    def meet(self, kept):
        found = list(kept)
        # All workers have the same devices, so they make these calls in the same order.
        for device in dict.fromkeys(self.devices):
            here = [index for index, owner in enumerate(self.devices) if owner == device]
            with tf.device(device):
                summed = self.exchange.sum_gradients([kept[index] for index in here])
            for index, gradient in zip(here, summed, strict=True):
                found[index] = gradient
        return found


class _Summed(CurrentDevice):
    """Implements `towers.owners.Owners` for towers of a worker whose gradients are their sums already."""

    def keep(self, per_tower):
        return list(per_tower[0])


class OwnParts:
    """Implements `towers.owners.Owners` for gradients that are already summed, of this worker's parts only.

    The towers have sent their gradients to the owners while they computed them (`towers.gathering`).
    """

    of_towers = _Summed()

    def __init__(
        self,
        exchange: WorkerExchange,
        parameters: Sequence[int],
        num_parameters: int,
        devices: Sequence[str] | None = None,
    ):
        """Args:
        exchange: exchanges between the workers.
        parameters: the index of the parameter of each part that this worker owns.
        num_parameters: number of all parameters.
        devices: the device of each of these parts; None for the current one.
        """
        self._devices = devices
        self._exchange, self._parameters, self._num_parameters = exchange, parameters, num_parameters

    def cut(self, of_tower):
        return list(of_tower)

    def keep(self, per_tower):
        (of_towers,) = per_tower
        held: list[Sequence] = []
        for gradient in of_towers:
            held += gradient.parts if isinstance(gradient, Slices) else [gradient]
        return [part for own in held for part in own]

    def add(self, kept):
        return self.each(lambda *of_part: gradients.add(of_part), *kept)

    def meet(self, kept):
        return list(kept)

    def each(self, function, *parts):
        if self._devices is None:
            return CURRENT_DEVICE.each(function, *parts)
        found = []
        for device, *given in zip(self._devices, *parts, strict=True):
            with tf.device(device):
                found.append(function(*given))
        return found

    def norm(self, squares):
        zero = tf.zeros([], tf.float64)
        (total,) = self._exchange.sum([tf.add_n([zero, *(tf.cast(square, tf.float64) for square in squares)])])
        return tf.sqrt(total)

    def norms(self, squares):
        return norms_over_workers(self._exchange, self._parameters, self._num_parameters, squares)


class SpreadOwners(OwnParts):
    """Implements `towers.owners.Owners`: each part's sum over all workers is sent only to its owner.

    Gradients are sent dense, in packs. In a pack the parts of each owner are adjacent, so that the pack's
    reduce-scatter is one call:

        pack    parts of rank 0 | parts of rank 1 | parts of rank 2      ->  each rank gets the sums of its own

    A list of parts contains only this worker's parts, in the model's order.
    """

    of_towers = CURRENT_DEVICE

    def __init__(
        self,
        exchange: WorkerExchange,
        cuts: ManyOwners,
        owners: Sequence[int],
        packs: Sequence[Sequence[int]],
        shapes: Sequence[tf.TensorShape],
        *,
        each_microbatch: bool,
    ):
        """Args:
        exchange: exchanges between the workers.
        cuts: how gradients are cut into parts; its devices are not used.
        owners: the rank of each part's owner.
        packs: indices of the parts that are sent together; all parts of a pack have the same dtype.
        shapes: shapes of the parameters.
        each_microbatch: whether gradients are sent after each microbatch, not once a step, so that a worker keeps
          only the sums of its own parts.
        """
        here = [part for part, owner in enumerate(owners) if owner == exchange.rank]
        super().__init__(exchange, [cuts.parameters[part] for part in here], len(shapes))
        self._cuts, self._shapes, self._here = cuts, shapes, here
        self._owners, self._each_microbatch = owners, each_microbatch
        self._packs = [sorted(pack, key=lambda part: owners[part]) for pack in packs]

    def keep(self, per_tower):
        summed = gradients.add_each(per_tower)
        return self._scattered(summed) if self._each_microbatch else summed

    def meet(self, kept):
        return list(kept) if self._each_microbatch else self._scattered(kept)

    def _scattered(self, own: Sequence[Gradient]) -> list[tf.Tensor]:
        """The sums over all workers of this worker's parts, from this worker's gradients of all parameters."""
        parts, found = self._cuts.cut(dense(own, self._shapes)), {}
        for pack in self._packs:
            here = [part for part in pack if self._owners[part] == self._exchange.rank]
            summed = own_sums(
                self._exchange, [parts[part] for part in pack], [self._owners[part] for part in pack]
            )
            found |= zip(here, summed, strict=True)
        return [found[part] for part in self._here]


def own_sums(
    exchange: WorkerExchange, parts: Sequence[tf.Tensor], owners: Sequence[int], purpose: str = ""
) -> list[tf.Tensor]:
    """The sums over all workers of those parts that this worker owns: one reduce-scatter.

    Args:
      exchange: exchanges between the workers.
      parts: this worker's gradients, of one dtype.
      owners: the rank of each part's owner, ascending.
      purpose: as for `WorkerExchange.reduce_scatter`.
    """
    sizes = [(owner, part.shape.num_elements()) for owner, part in zip(owners, parts, strict=True)]
    summed = exchange.reduce_scatter(packing.joined(parts), sizes_by_owner(sizes, exchange.num_workers), purpose)
    here = [part for owner, part in zip(owners, parts, strict=True) if owner == exchange.rank]
    return packing.parted(summed, here) if here else []


def norms_over_workers(
    exchange: WorkerExchange, parameters: Sequence[int], num_parameters: int, squares: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """For each part of this worker the Euclidean norm of its whole parameter's gradient.

    Args:
      exchange: sums over the workers.
      parameters: the index of each part's parameter.
      num_parameters: number of parameters of all workers.
      squares: the sums of squares of the parts.
    """
    own = [tf.zeros([], tf.float64)] * num_parameters
    for parameter, square in zip(parameters, squares, strict=True):
        own[parameter] += tf.cast(square, tf.float64)
    totals = exchange.sum(own)
    return [
        tf.cast(tf.sqrt(totals[parameter]), square.dtype)
        for parameter, square in zip(parameters, squares, strict=True)
    ]


def sizes_by_owner(sizes: Sequence[tuple[int, int]], num_workers: int) -> list[int]:
    """For each rank the sum of the sizes of its parts; `sizes` has (owner, size) of each part."""
    found = [0] * num_workers
    for owner, size in sizes:
        found[owner] += size
    return found


def dense(own: Sequence[Gradient], shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Gradients of the parameters of these shapes, sparse ones as dense tensors."""
    return [
        tf.ensure_shape(tf.convert_to_tensor(gradient), shape) for gradient, shape in zip(own, shapes, strict=True)
    ]
