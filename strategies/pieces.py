"""The contents of a checkpoint, in pieces that are written, sent and read one after another.

    tensor of a checkpoint    |------------------------------|
    parts                     |--- worker 0 ---|-- worker 1 -|    what one process has: the whole, or a slice
    blocks of rows            |------|------|------|------|--|    of at most `PIECE_BYTES`, or one row
    pieces                    |------|------|--|---|------|--|    a block's share of a part

Blocks are defined on the whole tensor, so a piece that one mode reads lies in few pieces that another mode has
written; TensorFlow reads each stored slice that it needs as a whole.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

# The most bytes of other processes' values that a process holds while a checkpoint is written or read.
PIECE_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A slice of a tensor of a checkpoint, and the variable that has it.

    Attributes:
      path: keys of the tensor in `Strategy.checkpointables`, e.g. ('slots', 'momentum', 'dense/kernel').
      variable: the variable with the values; for another process's, anything with `shape` and `dtype`.
      whole: shape of the tensor.
      origin: index in the tensor at which the variable begins, for each dimension.
      begin: index in the tensor at which the piece begins, for each dimension.
      shape: shape of the piece.
    """

    path: tuple[str, ...]
    variable: tf.Variable
    whole: tuple[int, ...]
    origin: tuple[int, ...]
    begin: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> tf.DType:
        return self.variable.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    @property
    def is_part(self) -> bool:
        """Whether the piece is the whole variable."""
        return self.shape == tuple(self.variable.shape)

    @property
    def within(self) -> tuple[slice, ...]:
        """The slices of the variable that the piece is."""
        starts = [begin - origin for begin, origin in zip(self.begin, self.origin, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))

    @property
    def slice_spec(self) -> str:
        """The slice in the format of TensorFlow's checkpoint operations; '' for the whole tensor."""
        if self.shape == self.whole:
            return ""
        places = (f"{begin},{length}" for begin, length in zip(self.begin, self.shape, strict=True))
        return f"{' '.join(map(str, self.whole))} {':'.join(places)}"

    def value(self) -> tf.Tensor:
        """The values; without a copy if the piece is the whole of a variable on a CPU."""
        value = self.variable.read_value()
        if self.is_part:
            return value
        with tf.device(value.device):
            return tf.slice(value, [place.start for place in self.within], self.shape)

    def divided(self) -> Iterator["Piece"]:
        """Its pieces within the blocks of rows, in order."""
        axis = next((index for index, length in enumerate(self.whole) if length > 1), None)
        if axis is None or not math.prod(self.whole):
            yield self
            return
        row_bytes = math.prod(self.whole) // self.whole[axis] * self.dtype.size
        rows, first = max(1, PIECE_BYTES // row_bytes), self.begin[axis]
        last = first + self.shape[axis]
        cuts = [first, *range(first - first % rows + rows, last, rows), last]
        for start, stop in itertools.pairwise(cuts):
            yield dataclasses.replace(
                self, begin=_with(self.begin, axis, start), shape=_with(self.shape, axis, stop - start)
            )


def first_element(piece: Piece) -> int:
    """Position of a piece's first element in its tensor, in C order. Pieces of a whole tensor are contiguous."""
    return int(np.ravel_multi_index(piece.begin, piece.whole)) if math.prod(piece.whole) else 0


def parts_of(contents: Mapping) -> list[Piece]:
    """The parts of all variables of `Strategy.checkpointables`, in the same order in all processes of a run."""
    return [part for path, leaf in _leaves(contents, ()) for part in _parts(path, leaf)]


def pieces_of(contents: Mapping) -> list[Piece]:
    """The pieces of all parts."""
    return [piece for part in parts_of(contents) for piece in part.divided()]


def _leaves(node, path):
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield from _leaves(child, (*path, name))
    else:
        yield path, node


def _parts(path, leaf) -> Iterator[Piece]:
    whole, position = tuple(leaf.shape), 0
    for variable in getattr(leaf, "parts", (leaf,)):
        shape, begin = tuple(variable.shape), (0,) * len(whole)
        if shape != whole:
            begin = _with(begin, leaf.dimension, position)
            position += shape[leaf.dimension]
        yield Piece(path=path, variable=variable, whole=whole, origin=begin, begin=begin, shape=shape)


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
