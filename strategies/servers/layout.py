"""All parameters as one vector, and which piece of it each server holds.

    kernel          bias   kernel                embedding
    |---------------|------|---------------------|-------------|      names, in the model's order
    |    server 0         |      server 1       |   server 2   |      cuts

The pieces have the same size, except that a cut in a matrix moves by at most half a row to lie between two rows: a
row of an embedding is on one server.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

# Number of elements. A longer row (of a convolution's kernel, for example) may be cut anywhere.
_LONGEST_WHOLE_ROW = 16 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each parameter and each server's piece lies in the vector; positions are indices of elements.

    Attributes:
      shapes: the parameters' shapes, by canonical name, in order.
      num_servers: number of pieces.
    """

    shapes: Mapping[str, tuple[int, ...]]
    num_servers: int

    @property
    def length(self) -> int:
        """Number of elements of the whole vector."""
        return self.offsets[-1]

    @functools.cached_property
    def offsets(self) -> list[int]:
        """[parameters + 1], the position at which each parameter begins, and the vector's length."""
        return [0, *np.cumsum([math.prod(shape) for shape in self.shapes.values()], dtype=np.int64).tolist()]

    @functools.cached_property
    def cuts(self) -> list[int]:
        """[servers + 1], ascending; server k holds the positions [cuts[k], cuts[k + 1])."""
        if not self.shapes:
            # All parameters are tables.
            return [0] * (self.num_servers + 1)
        inner = [self._cut_near(self.length * server / self.num_servers) for server in range(1, self.num_servers)]
        return [0, *inner, self.length]

    def piece(self, server: int) -> slice:
        """The positions that a server holds."""
        cuts = self.cuts
        return slice(cuts[server], cuts[server + 1])

    def _cut_near(self, wanted: float) -> int:
        offsets = self.offsets
        index = int(np.searchsorted(offsets, wanted, side="right")) - 1
        width = row_width(list(self.shapes.values())[min(index, len(self.shapes) - 1)])
        return offsets[index] + round((wanted - offsets[index]) / width) * width

    def joined(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The whole vector of all parameters' values, given in order."""
        return np.concatenate([np.ravel(value) for value in values])


def row_width(shape: Sequence[int]) -> int:
    """Number of consecutive elements that stay on one server: a row of a matrix unless it is too long, else 1."""
    width = math.prod(shape[1:]) if len(shape) > 1 else 1
    return width if 0 < width <= _LONGEST_WHOLE_ROW else 1
