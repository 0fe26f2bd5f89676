"""A gradient as sent to a server: dense elements, and for embeddings only the rows that a batch used."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a matrix that is part of a vector.

    Attributes:
      begin: index in the vector at which the matrix's row 0 begins.
      height: number of rows of the matrix.
      width: number of elements of a row.
      indices: int64 [n], indices of the rows, each at most once.
      values: [n, width], the rows.
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
        """The rows inside `piece`, as rows of a vector that is this piece; None if the matrix lies outside it."""
        if self.end <= piece.start or self.begin >= piece.stop:
            return None
        first = max(0, piece.start - self.begin) // self.width
        last = (min(self.end, piece.stop) - self.begin) // self.width
        here = (self.indices >= first) & (self.indices < last)
        begin = max(self.begin, piece.start) - piece.start
        return Rows(begin, last - first, self.width, self.indices[here] - first, self.values[here])


@dataclasses.dataclass(frozen=True)
class SplitGradient:
    """The gradient of a vector.

    Attributes:
      dense: the elements outside the matrices of `rows`, in order.
      rows: one entry for each matrix that is sent as rows, in order.
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
        """The gradient as one vector; rows that are not in `rows` are zero."""
        if not self.rows:
            return self.dense.astype(dtype, copy=False)
        length = len(self.dense) + sum(rows.height * rows.width for rows in self.rows)
        vector, used, position = np.zeros(length, dtype), 0, 0
        for rows in self.rows:
            count = rows.begin - position
            vector[position : rows.begin] = self.dense[used : used + count]
            vector[rows.begin : rows.end].reshape(rows.height, rows.width)[rows.indices] = rows.values
            used, position = used + count, rows.end
        vector[position:] = self.dense[used:]
        return vector

    def packed(self) -> tuple[list[list[int]], list[np.ndarray]]:
        """The [begin, height, width] of each entry of `rows`, and all arrays; `unpacked` is the inverse."""
        arrays = [self.dense]
        for rows in self.rows:
            arrays += [rows.indices, rows.values]
        return [[rows.begin, rows.height, rows.width] for rows in self.rows], arrays

    @classmethod
    def unpacked(cls, extents: Sequence[Sequence[int]], arrays: Sequence[np.ndarray]) -> "SplitGradient":
        """The gradient from the result of `packed`."""
        dense, *pairs = arrays
        rows = [Rows(*extent, *pairs[2 * index : 2 * index + 2]) for index, extent in enumerate(extents)]
        return cls(dense, rows)
