"""Whether an update is applied, and how a graph skips it: by a conditional or by masks.

    conditional   if flag: update                        the operations run only if the flag is set
    masks         old = w; update; w = flag ? w : old    they always run, and the old values come back, bit by bit

The executor evaluates a conditional on the host. If the flag is computed on a GPU, the host would wait for the
flag in every step, and then the GPU for the host. On CPUs a conditional costs nothing, and masks copy one
parameter with its slots at a time: a step of `tiny` takes 3.9 ms of CPU time instead of 3.6, of ResNet-20 182
instead of 179 (batch 64, Intel Xeon with AVX-512 without AMX, loaded). A learning rate of 0 would not mask: NaN *
0 is NaN.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf


class Permission(NamedTuple):
    """Whether variables may change.

    Attributes:
      flag: bool scalar.
      masked: whether masks replace the conditional. They select values (NaN * 0 is NaN).
    """

    flag: tf.Tensor
    masked: bool = False

    def run(self, act: Callable[[], None]) -> None:
        """Runs `act`, in a graph too, if the flag is set.

        With masks `act` always runs, so it must change variables only through the methods below.
        """
        if self.masked:
            act()
            return

        def run():
            act()
            return tf.constant(True)

        tf.cond(self.flag, run, lambda: tf.constant(False))

    def change(self, variables: Sequence[tf.Variable], act: Callable[[], None]) -> list:
        """Runs `act`, which changes these variables in place; they keep their values if the flag is not set.

        Call it within `run`.

        Returns:
          The operations after which the old values are freed; none with a conditional.
        """
        if not self.masked:
            act()
            return []
        # The update kernels copy a value that others still read, and change the copy.
        before = [variable.read_value() for variable in variables]
        act()
        return [
            self.assign(variable, variable.read_value(), old)
            for variable, old in zip(variables, before, strict=True)
        ]

    def change_rows(self, table: tf.Variable, rows: tf.Tensor, act: Callable[[], None]) -> list:
        """As `change`, for an `act` that changes only these rows of a table; `rows` has each at most once."""
        if not self.masked:
            act()
            return []
        before = tf.gather(table, rows)
        act()
        kept = tf.where(self.flag, tf.gather(table, rows), before)
        return [table.scatter_update(tf.IndexedSlices(kept, rows))]

    def assign(self, variable: tf.Variable, value: tf.Tensor, otherwise: tf.Tensor | None = None):
        """Assigns `value`; if the flag is not set, `otherwise`, by default the variable's own value."""
        if self.masked:
            value = tf.where(self.flag, value, variable.read_value() if otherwise is None else otherwise)
        return variable.assign(value)
