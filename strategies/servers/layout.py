"""All parameters as one vector, and which piece of it each server keeps.

    kernel          bias   kernel                embedding
    |---------------|------|---------------------|-------------|      names, in the model's order
    |    server 0         |      server 1       |   server 2   |      cuts

Cut by bytes, wherever that falls: each cut lies within half a row of where the pieces were equal. Rows of matrices
stay whole, so that a row of an embedding is one server's.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

# Longer rows (of a convolution's kernel, say) may be cut anywhere.
_LONGEST_WHOLE_ROW = 16 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions count elements.

    Attributes:
      shapes: of each parameter, by canonical name, in order.
      num_servers: pieces to cut.
    """

    shapes: Mapping[str, tuple[int, ...]]
    num_servers: int

    @property
    def length(self) -> int:
        """Of the whole vector."""
        return self.offsets[-1]

    @functools.cached_property
    def offsets(self) -> list[int]:
        """[parameters + 1] where each begins."""
        return [0, *np.cumsum([math.prod(shape) for shape in self.shapes.values()], dtype=np.int64).tolist()]

    @functools.cached_property
    def cuts(self) -> list[int]:
        """[servers + 1] ascending; server k keeps [cuts[k], cuts[k + 1])."""
        inner = [self._cut_near(self.length * server / self.num_servers) for server in range(1, self.num_servers)]
        return [0, *inner, self.length]

    def piece(self, server: int) -> slice:
        """What a server keeps."""
        cuts = self.cuts
        return slice(cuts[server], cuts[server + 1])

    def _cut_near(self, wanted: float) -> int:
        offsets = self.offsets
        place = int(np.searchsorted(offsets, wanted, side="right")) - 1
        width = row_width(list(self.shapes.values())[min(place, len(self.shapes) - 1)])
        return offsets[place] + round((wanted - offsets[place]) / width) * width

    def split(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """The parameters in a whole vector, by name; views of it."""
        offsets = self.offsets
        return {
            name: vector[begin:end].reshape(shape)
            for (name, shape), begin, end in zip(self.shapes.items(), offsets, offsets[1:], strict=False)
        }

    def joined(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The vector of some parameters' values, in order."""
        return np.concatenate([np.ravel(value) for value in values])


def row_width(shape: Sequence[int]) -> int:
    """Elements that are never divided between servers: a row of a matrix that is not too long, else one."""
    width = math.prod(shape[1:]) if len(shape) > 1 else 1
    return width if 0 < width <= _LONGEST_WHOLE_ROW else 1
