"""Copies many tensors from one device to another in packs; gradients reach their owners in packs too.

Each copy between GPUs has a fixed cost, like an exchange between processes (`towers.packing`):

    GPU 0    kernel, bias, kernel, bias  ->  one vector ---copy--->  kernel, bias, kernel, bias    GPU 1

The copies are equal bit for bit. For a moment both devices hold the vector besides the tensors.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

import tensorflow as tf

from towers import packing
from towers.gradients import Gradient
from towers.layers.table_rows import TableRows
from towers.owners import Copies, MetAtOwners, Slices

# Largest size of a pack, as in a ring. Between GPUs 4 MiB take 170 us at 25 GB/s (PCIe 4.0), and the fixed cost of
# a copy is about 10 us: larger packs would gain little and delay the first gradients. Never measured.
BYTES_PER_PACK = 4 << 20

Value = tf.Tensor | TableRows | Slices | Copies


@dataclasses.dataclass(frozen=True)
class PackedCopies:
    """Sends tensors in packs: a pack holds tensors of one dtype that go from one device to the same targets.

    Attributes:
      between: a function of a source and a target device: whether copies between them are packed.
      bytes_per_pack: largest size of a pack.
    """

    between: Callable[[str, str], bool]
    bytes_per_pack: int = BYTES_PER_PACK

    def sent(
        self, values: Sequence, sources: Sequence[str], targets: Sequence[Collection[str]]
    ) -> list[dict[str, tf.Tensor]]:
        """For each value, by target device, the tensor to use there: the value itself where it is not packed.

        Tensors larger than a pack, sparse gradients, rows of tables and integers (most of which TensorFlow keeps
        in the host's memory) are not packed.

        Args:
          values: values in the order of the layers; the last are sent first, as their gradients are ready first.
          sources: the device of each value.
          targets: the devices that use each value; its source may be one of them.
        """
        found = [dict.fromkeys(of_value, value) for value, of_value in zip(values, targets, strict=True)]
        for (source, away, _), indices in self._together(values, sources, targets).items():
            sizes = [values[index].shape.num_elements() * values[index].dtype.size for index in indices]
            for pack in packing.packs(sizes, self.bytes_per_pack):
                if len(pack) == 1:
                    continue
                chosen = [indices[position] for position in pack]
                whole = [values[index] for index in chosen]
                with tf.device(source):
                    vector = packing.joined(whole)
                for target in away:
                    with tf.device(target):
                        for index, part in zip(chosen, packing.parted(vector, whole), strict=True):
                            found[index][target] = part
        return found

    def _together(self, values, sources, targets) -> dict[tuple, list[int]]:
        """Indices of the values that may share packs, by (source, targets, dtype)."""
        found: dict[tuple, list[int]] = {}
        for index, (value, source, of_value) in enumerate(zip(values, sources, targets, strict=True)):
            away = tuple(target for target in dict.fromkeys(of_value) if self.between(source, target))
            if away and _can_be_packed(value):
                found.setdefault((source, away, value.dtype), []).append(index)
        return found

    def moved(self, values: Sequence, source: str, targets: Sequence[str]) -> list:
        """The values, all from one device, each on its target device."""
        sent = self.sent(values, [source] * len(values), [(target,) for target in targets])
        return [by_device[target] for by_device, target in zip(sent, targets, strict=True)]

    def for_towers(self, values: Sequence[Value], homes: Sequence[str], towers: Sequence[str]) -> list[Value]:
        """The values that towers read, as `Copies` on their devices; those that are `Copies` already stay.

        Args:
          values: as `towers.parameters.placement.Placement.read` returns them.
          homes: the device of each value, or of each part of `Slices`.
          towers: the device of each tower.
        """
        parts = [list(value.parts) if isinstance(value, Slices) else [value] for value in values]
        flat = [part for of_value in parts for part in of_value]
        away = [[] if isinstance(part, Copies) else towers for part in flat]
        sent = iter(self.sent(flat, homes, away))
        return [_as_read(value, sent, towers) for value in values]


# Every tensor is sent alone, by TensorFlow.
UNPACKED = PackedCopies(lambda source, target: False)


def _can_be_packed(value) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating and value.shape.is_fully_defined()


def _as_read(value: Value, sent: Iterator[dict[str, tf.Tensor]], towers: Sequence[str]) -> Copies:
    """A value with a copy for each tower; takes from `sent` what was sent of this value."""
    if isinstance(value, Copies):
        next(sent)
        return value
    if not isinstance(value, Slices):
        of_value = next(sent)
        return Copies([of_value[tower] for tower in towers])
    of_parts = [next(sent) for _ in value.parts]
    return Copies([value._replace(parts=[of_part[tower] for of_part in of_parts]) for tower in towers])


@dataclasses.dataclass(frozen=True)
class PackedOwners(MetAtOwners):
    """Implements `towers.owners.Owners`: towers with one device each send their gradients to the owners in packs.

    Attributes:
      owners: where they meet.
      copies: sends them.
      towers: the device of each tower.
      devices: the device of each part.
      home: the device that computes the norm.
    """

    copies: PackedCopies
    towers: Sequence[str]
    devices: Sequence[str]
    home: str

    def cut(self, of_tower: Sequence[Gradient]) -> list[Gradient]:
        return self.owners.cut(of_tower)

    def keep(self, per_tower: Sequence[Sequence[Gradient]]) -> list[Gradient]:
        sent = [
            self.copies.moved(of_tower, tower, self.devices)
            for tower, of_tower in zip(self.towers, per_tower, strict=True)
        ]
        return self.owners.keep(sent)

    def add(self, kept: Sequence[Sequence[Gradient]]) -> list[Gradient]:
        return self.owners.add(kept)

    def meet(self, kept: Sequence[Gradient]) -> list[Gradient]:
        return self.owners.meet(kept)

    def norm(self, squares: Sequence[tf.Tensor]) -> tf.Tensor:
        return self.owners.norm(self._at_home(squares))

    def norms(self, squares: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self.owners.norms(self._at_home(squares))

    def _at_home(self, squares: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        sent = self.copies.sent(squares, self.devices, [(self.home,)] * len(squares))
        return [by_device[self.home] for by_device in sent]
