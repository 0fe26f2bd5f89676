"""A gradient on its way to a server: dense numbers, and of embeddings only the rows that were touched."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a matrix that lies somewhere in a vector.

    Attributes:
      begin: position of the matrix's row 0 in the vector.
      height, width: of the matrix.
      indices: int64 [n], each row at most once.
      values: [n, width].
    """

    begin: int
    height: int
    width: int
    indices: np.ndarray
    values: np.ndarray

    @property
    def end(self) -> int:
        return self.begin + self.height * self.width

    def within(self, piece: slice) -> "Rows | None":
        """Those that lie in `piece`, as rows of a vector that begins there; None if nothing of the matrix does."""
        if self.end <= piece.start or self.begin >= piece.stop:
            return None
        first = max(0, piece.start - self.begin) // self.width
        last = (min(self.end, piece.stop) - self.begin) // self.width
        here = (self.indices >= first) & (self.indices < last)
        begin = max(self.begin, piece.start) - piece.start
        return Rows(begin, last - first, self.width, self.indices[here] - first, self.values[here])


@dataclasses.dataclass(frozen=True)
class SplitGradient:
    """A vector's gradient.

    Attributes:
      dense: the numbers outside the matrices of `rows`, in order.
      rows: one a matrix, in order.
    """

    dense: np.ndarray
    rows: Sequence[Rows] = ()

    def within(self, piece: slice) -> "SplitGradient":
        """The part for a piece of the vector."""
        begin, end = (position - self._in_rows_before(position) for position in (piece.start, piece.stop))
        found = (rows.within(piece) for rows in self.rows)
        return SplitGradient(self.dense[begin:end], [rows for rows in found if rows is not None])

    def _in_rows_before(self, position: int) -> int:
        return sum(min(max(position - rows.begin, 0), rows.height * rows.width) for rows in self.rows)

    def whole(self, dtype: np.dtype) -> np.ndarray:
        """As one vector; rows that were not touched are zero."""
        if not self.rows:
            return self.dense.astype(dtype, copy=False)
        length = len(self.dense) + sum(rows.height * rows.width for rows in self.rows)
        vector, given, position = np.zeros(length, dtype), 0, 0
        for rows in self.rows:
            count = rows.begin - position
            vector[position : rows.begin] = self.dense[given : given + count]
            vector[rows.begin : rows.end].reshape(rows.height, rows.width)[rows.indices] = rows.values
            given, position = given + count, rows.end
        vector[position:] = self.dense[given:]
        return vector

    def packed(self) -> tuple[list[list[int]], list[np.ndarray]]:
        """What a message holds of it; `unpacked` takes it."""
        arrays = [self.dense]
        for rows in self.rows:
            arrays += [rows.indices, rows.values]
        return [[rows.begin, rows.height, rows.width] for rows in self.rows], arrays

    @classmethod
    def unpacked(cls, places: Sequence[Sequence[int]], arrays: Sequence[np.ndarray]) -> "SplitGradient":
        """Of what `packed` gave."""
        dense, *pairs = arrays
        rows = [Rows(*place, *pairs[2 * n : 2 * n + 2]) for n, place in enumerate(places)]
        return cls(dense, rows)
