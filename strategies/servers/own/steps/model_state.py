"""The model's state (batch statistics and the like) as server 0 holds it."""

import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf


class ModelState:
    """All state as one vector. Each element keeps the precision of its variable, as in a checkpoint.

    So a run that is resumed from a checkpoint continues with the same numbers.
    """

    def __init__(self, values: np.ndarray, averaged: np.ndarray, dtypes: Sequence[tuple[str, int]] = ()):
        """Args:
        values: [n], floating; copied.
        averaged: [n] bool, the elements that are averaged over workers.
        dtypes: for each variable its dtype and number of elements, in order; () if all have the dtype of `values`.
        """
        self._values, self._averaged = values.copy(), averaged
        self._narrower: list[tuple[slice, np.dtype]] = []
        begin = 0
        for name, of_name in itertools.groupby(dtypes, key=lambda described: described[0]):
            end = begin + sum(count for _, count in of_name)
            if (dtype := np.dtype(tf.as_dtype(name).as_numpy_dtype)) != values.dtype:
                self._narrower.append((slice(begin, end), dtype))
            begin = end

    def read(self) -> np.ndarray:
        """A copy of the vector."""
        return self._values.copy()

    def add(self, change: np.ndarray, weight: float = 1.0) -> None:
        """Adds a change.

        Args:
          change: [n]; averaged elements are SUMs over examples.
          weight: divisor of averaged elements, not 0.
        """
        self._values += change / np.where(self._averaged, weight, 1.0)
        for part, dtype in self._narrower:
            self._values[part] = self._values[part].astype(dtype)
