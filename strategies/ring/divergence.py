"""Detects workers whose copies differ, by checksums."""

import collections
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

_NAMED = 3


class Diverged(RuntimeError):
    """The workers' copies of the parameters differ."""


def checksums(contents: Iterable[bytes]) -> np.ndarray:
    """CRC-32 of each content, as float64, which represents 32 bits exactly."""
    return np.array([zlib.crc32(content) for content in contents], np.float64)


def what_drifted(workers: Sequence[str], names: Sequence[str], found: np.ndarray, step: int) -> None:
    """Raises `Diverged` unless all rows are equal.

    Args:
      workers: names of the workers, one for each row.
      names: names of the variables, one for each column.
      found: [workers, names] checksums.
      step: the step at which they were taken.
    """
    rows = [tuple(row) for row in found]
    ((common, held_by),) = collections.Counter(rows).most_common(1)
    if held_by == len(rows):
        return
    others = [worker for worker, row in zip(workers, rows, strict=True) if row != common]
    differing = [name for name, column in zip(names, found.T, strict=True) if len(set(column)) > 1]
    written = ", ".join(differing[:_NAMED]) + (", ..." if len(differing) > _NAMED else "")
    # Without a majority it is unknown which copy is right.
    has_majority = 2 * held_by > len(rows)
    what = f"{', '.join(others)} drifted from the others" if has_majority else f"{' and '.join(workers)} differ"
    raise Diverged(
        f"{what}: {len(differing)} of {len(names)} variables are not the same at step {step} ({written}): "
        "check that machine's memory and TensorFlow version; resume from the last checkpoint without it"
    )
