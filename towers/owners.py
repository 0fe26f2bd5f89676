"""Where the towers' gradients meet: on the current device, or each on the device that owns its parameter.

Nothing but scalars leaves an owner: sums, means, norms and clipping are computed where the parameter is.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import tensorflow as tf

from towers import gradients
from towers.gradients import Gradient

T = TypeVar("T")


class Slices(NamedTuple):
    """A parameter's value as slices, each on its owner's device.

    Attributes:
      parts: the slices, in order.
      dimension: dimension along which they follow each other.
    """

    parts: Sequence[tf.Tensor]
    dimension: int


class Copies(NamedTuple):
    """A value of a parameter or of state with a copy for each tower, on that tower's device.

    Attributes:
      of_towers: for each tower a tensor, or `Slices`.
    """

    of_towers: Sequence[tf.Tensor | Slices]


def at_tower(values: Sequence, tower: int) -> list:
    """The values that a tower reads: of `Copies` the tower's own, otherwise the value itself."""
    return [value.of_towers[tower] if isinstance(value, Copies) else value for value in values]


def whole(value):
    """A parameter's value on the current device; `Slices` are sent there and joined."""
    return tf.concat(value.parts, value.dimension) if isinstance(value, Slices) else value


class Owners(Protocol):
    """Where gradients meet. A part is the gradient of a parameter, or of a slice of it."""

    def cut(self, of_tower: Sequence[Gradient]) -> list[Gradient]:
        """The parts of a tower's gradients, on the current device.

        Args:
          of_tower: for each parameter its gradient, or, if the tower has cut it like its parameter, `Slices`.
        """

    def keep(self, per_tower: Sequence[Sequence[Gradient]]) -> list[Gradient]:
        """What is kept of a microbatch until the step's end: for each part the sum over the towers, on its owner.

        Implementations in other modules may keep more than sums; `meet` then adds them up.
        """

    def add(self, kept: Sequence[Sequence[Gradient]]) -> list[Gradient]:
        """The sum of what was kept of several microbatches."""

    def meet(self, kept: Sequence[Gradient]) -> list[Gradient]:
        """For each part the sum over the towers, on its owner."""

    def each(self, function: Callable[..., T], *parts: Sequence) -> list[T]:
        """`function` of each part, computed on its owner. With several lists it gets one item of each."""

    def norm(self, squares: Sequence[tf.Tensor]) -> tf.Tensor:
        """The Euclidean norm over all parts, a float64 scalar, from the parts' sums of squares."""

    def norms(self, squares: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """For each part the Euclidean norm of its whole parameter's gradient, from the parts' sums of squares."""


class CurrentDevice:
    """Implements `Owners` for gradients that all meet on the current device."""

    def cut(self, of_tower):
        return list(of_tower)

    def keep(self, per_tower):
        return self.add(per_tower)

    def add(self, kept):
        return gradients.add_each(kept)

    def meet(self, kept):
        return list(kept)

    def each(self, function, *parts):
        return [function(*given) for given in zip(*parts, strict=True)]

    def norm(self, squares):
        return gradients.norm_of_squares(squares)

    def norms(self, squares):
        return [tf.sqrt(square) for square in squares]


CURRENT_DEVICE = CurrentDevice()


@dataclasses.dataclass(frozen=True)
class ManyOwners:
    """Implements `Owners` for parameters on several devices.

    Attributes:
      devices: the device of each part.
      parameters: the index of each part's parameter, ascending.
      slicing: by index of a sliced parameter, the dimension and the lengths of its parts.
    """

    devices: Sequence[str]
    parameters: Sequence[int]
    slicing: Mapping[int, tuple[int, Sequence[int]]]

    def cut(self, of_tower):
        found = []
        for index, gradient in enumerate(of_tower):
            if isinstance(gradient, Slices):
                found += gradient.parts
            else:
                found += parts_of(gradient, *self.slicing[index]) if index in self.slicing else [gradient]
        return found

    def keep(self, per_tower):
        return self.add(per_tower)

    def add(self, kept):
        return self.each(lambda *of_part: gradients.add(of_part), *kept)

    def meet(self, kept):
        return list(kept)

    def each(self, function, *parts):
        found = []
        for device, *given in zip(self.devices, *parts, strict=True):
            with tf.device(device):
                found.append(function(*given))
        return found

    def norm(self, squares):
        return gradients.norm_of_squares(squares)

    def norms(self, squares):
        of_parameter: dict[int, list] = {}
        for parameter, square in zip(self.parameters, squares, strict=True):
            of_parameter.setdefault(parameter, []).append(square)
        return [tf.sqrt(tf.add_n(of_parameter[parameter])) for parameter in self.parameters]


@dataclasses.dataclass(frozen=True)
class MetAtOwners:
    """What `Owners` do with gradients that have met.

    Attributes:
      owners: where they meet.
    """

    owners: Owners

    def each(self, function, *parts):
        return self.owners.each(function, *parts)

    def norm(self, squares):
        return self.owners.norm(squares)

    def norms(self, squares):
        return self.owners.norms(squares)


@dataclasses.dataclass(frozen=True)
class LateOwners(MetAtOwners):
    """Implements `Owners`: each tower sums its gradients over the microbatches; they meet after the last one.

    Attributes:
      owners: where they meet.
      towers: the device of each tower.
    """

    towers: Sequence[str]

    def cut(self, of_tower):
        return list(of_tower)

    def keep(self, per_tower):
        return [gradient for of_tower in per_tower for gradient in of_tower]

    def add(self, kept):
        per_tower = zip(*(self._by_tower(of_microbatch) for of_microbatch in kept), strict=True)
        found = []
        for device, of_tower in zip(self.towers, per_tower, strict=True):
            with tf.device(device):
                found += gradients.add_each(of_tower)
        return found

    def meet(self, kept):
        per_tower = []
        for device, of_tower in zip(self.towers, self._by_tower(kept), strict=True):
            with tf.device(device):
                per_tower.append(self.owners.cut(of_tower))
        return self.owners.keep(per_tower)

    def _by_tower(self, kept: Sequence[Gradient]) -> list[Sequence[Gradient]]:
        """What is kept, split by tower."""
        size = len(kept) // len(self.towers)
        return [kept[begin : begin + size] for begin in range(0, len(kept), size)]


def parts_of(gradient: Gradient, dimension: int, lengths: Sequence[int]) -> list[Gradient]:
    """The slices of a gradient; rows of a sparse one go to the slice that has them."""
    if not isinstance(gradient, tf.IndexedSlices) or dimension != 0:
        return tf.split(tf.convert_to_tensor(gradient), lengths, dimension)
    found, begin = [], 0
    for length in lengths:
        here = tf.where((gradient.indices >= begin) & (gradient.indices < begin + length))[:, 0]
        shape = tf.concat([tf.cast([length], gradient.dense_shape.dtype), gradient.dense_shape[1:]], 0)
        rows = tf.gather(gradient.indices, here) - begin
        found.append(tf.IndexedSlices(tf.gather(gradient.values, here), rows, shape))
        begin += length
    return found
