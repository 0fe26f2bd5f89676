"""Which stage or device the operations of a graph belong to, noted while the graph is traced."""

import contextlib

import tensorflow as tf

from towers.recompute.recomputation import TracedPass


class Marks:
    """Records which stage (or device of a tower) the operations of a graph belong to while they are created.

    Attributes:
      first, last: number of operations before the first stage, and after the last one.
      backward: number of operations before the backward pass; None if there is none.
      end: number of operations that the function created; later ones only pass results on.
      recomputed: what the backward pass computes again; None for nothing.
    """

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._stage: int | None = None
        # (number of operations, the stage of those that follow)
        self._changes: list[tuple[int, int | None]] = [(0, None)]
        self.first = self.last = self.end = 0
        self.backward: int | None = None
        self.recomputed: TracedPass | None = None

    @property
    def count(self) -> int:
        """Number of operations so far."""
        return len(self._graph.get_operations())

    @contextlib.contextmanager
    def at(self, stage: int):
        """Context manager: the operations created inside it belong to the stage."""
        before = self._stage
        self._set(stage)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, stage: int | None) -> None:
        self._stage = stage
        self._changes.append((self.count, stage))

    def stages(self) -> list[int | None]:
        """[operations] the stage of each operation; None for those outside all stages."""
        found: list[int | None] = []
        ends = [*(count for count, _ in self._changes[1:]), self.count]
        for (begin, stage), end in zip(self._changes, ends, strict=True):
            found += [stage] * (end - begin)
        return found
