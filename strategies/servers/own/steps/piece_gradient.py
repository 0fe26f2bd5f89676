"""The gradient of a server's piece: of its part of the vector, and of some rows of its tables."""

import dataclasses
from collections.abc import Sequence

import numpy as np

Rows = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class PieceGradient:
    """Attributes:
    vector: [n].
    rows: for each table (ids [k] of this server's rows, each once, and values [k, width]).
    """

    vector: np.ndarray
    rows: Sequence[Rows] = ()

    @classmethod
    def unpacked(cls, vector: np.ndarray, arrays: Sequence[np.ndarray]) -> "PieceGradient":
        """The gradient from a vector and arrays ids, values, ids, values, ... in the vector's dtype."""
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return cls(vector, [(ids, values.astype(vector.dtype, copy=False)) for ids, values in pairs])

    @classmethod
    def total(cls, gradients: Sequence["PieceGradient"]) -> "PieceGradient":
        """The sum, added in the given order, so that its bits are the same each time."""
        vector = gradients[0].vector.copy()
        for other in gradients[1:]:
            vector += other.vector
        return cls(vector, [_added(of_table) for of_table in zip(*(one.rows for one in gradients), strict=True)])

    def map(self, function) -> "PieceGradient":
        """Applies `function` to the vector and to the rows' values."""
        return PieceGradient(function(self.vector), [(ids, function(values)) for ids, values in self.rows])

    @property
    def square(self) -> float:
        """Sum of the squares of all elements."""
        found = (np.ravel(values) for values in (self.vector, *(values for _, values in self.rows)))
        return float(sum(np.dot(values, values) for values in found if len(values)))


def _added(of_workers: Sequence[Rows]) -> Rows:
    ids = np.unique(np.concatenate([ids for ids, _ in of_workers]))
    values = np.zeros((len(ids), of_workers[0][1].shape[1]), of_workers[0][1].dtype)
    for own, added in of_workers:
        values[np.searchsorted(ids, own)] += added
    return ids, values
