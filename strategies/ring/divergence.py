"""Whether copies that should be the same still are, by checksums."""

import collections
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

_NAMED = 3


class Diverged(RuntimeError):
    """Workers that should hold the same parameters do not."""


def checksums(contents: Iterable[bytes]) -> np.ndarray:
    """CRC-32 of each, as float64, which holds 32 bits exactly."""
    return np.array([zlib.crc32(content) for content in contents], np.float64)


def what_drifted(workers: Sequence[str], names: Sequence[str], found: np.ndarray, step: int) -> None:
    """Raises `Diverged` unless all rows are equal.

    Args:
      workers: names, one a row.
      names: of what was summed, one a column.
      found: [workers, names] checksums.
      step: at which they were taken.
    """
    rows = [tuple(row) for row in found]
    ((common, held_by),) = collections.Counter(rows).most_common(1)
    if held_by == len(rows):
        return
    others = [worker for worker, row in zip(workers, rows, strict=True) if row != common]
    differing = [name for name, column in zip(names, found.T, strict=True) if len(set(column)) > 1]
    written = ", ".join(differing[:_NAMED]) + (", ..." if len(differing) > _NAMED else "")
    # Of two that differ nobody can tell which is right.
    who = f"{', '.join(others)} drifted from the others" if 2 * held_by > len(rows) else " and ".join(workers)
    verb = "" if 2 * held_by > len(rows) else " differ"
    raise Diverged(
        f"{who}{verb}: {len(differing)} of {len(names)} variables are not the same at step {step} ({written}): "
        "suspect that machine's memory or TensorFlow's version; go on from the last checkpoint without it"
    )
