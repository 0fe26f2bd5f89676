"""Handles steps that are not finite: stops training, or names a label that is out of range."""

from collections.abc import Callable, Sequence

import numpy as np

from strategies.data_checks.non_finite import Causes
from strategies.errors import NonFiniteStep
from towers.counters import Counters
from towers.mean_and_update import StepOutcome
from towers.task import Batch


class BadSteps:
    """Checks the outcomes of a run's steps. All processes of the run check the same outcomes."""

    def __init__(
        self, counters: Counters, causes: Causes, batches_again: Callable[[int], Sequence[Batch]], *, on_cpu: bool
    ):
        """Args:
        counters: counters of the engine; after the step `bad_step` no update is applied.
        causes: finds out why a step was not finite.
        batches_again: function from a step's index to its (micro)batches, which it reads once more.
        on_cpu: whether this process's towers are on CPUs, where labels out of range are errors.
        """
        self._counters, self._causes, self._batches_again, self._on_cpu = counters, causes, batches_again, on_cpu
        self._has_checked_labels = False

    def check_before(self) -> None:
        """Raises NonFiniteStep before steps that would follow a bad one: no update would be applied."""
        bad = int(self._counters.bad_step)
        if bad >= 0:
            raise NonFiniteStep(
                f"step {bad} was not finite and no later step is applied: restore a checkpoint before continuing",
                step=bad,
            )

    def check(self, first: int, outcomes: Sequence[StepOutcome]) -> None:
        """Checks the outcomes of the steps from `first` on.

        Raises:
          NonFiniteStep: one of them was not finite, and no later step is applied.
          UserError: its labels, or those of the first step that was skipped, are out of range.
        """
        self._stop_if_bad(first, outcomes)
        self._check_skipped_labels(first, outcomes)

    def _stop_if_bad(self, first: int, outcomes: Sequence[StepOutcome]) -> None:
        if all(outcome.finite for outcome in outcomes):
            return
        bad = int(self._counters.bad_step)
        # Steps that were started since may hold the first bad one.
        if first <= bad < first + len(outcomes):
            raise self._causes.of_step(bad, outcomes[bad - first], self._batches_again(bad))

    def _check_skipped_labels(self, first: int, outcomes: Sequence[StepOutcome]) -> None:
        """Raises UserError if a skipped step has labels out of range, which spoil its loss on a GPU.

        Only the run's first step whose loss is not finite is checked: reading its batch again takes as long as a
        resume.
        """
        lost = (index for index, outcome in enumerate(outcomes) if not np.isfinite(outcome.loss_sum))
        index = next(lost, None)
        if index is None or self._has_checked_labels:
            return
        self._has_checked_labels = True
        if not self._causes.all_true(self._on_cpu):
            self._causes.check_labels(self._batches_again(first + index), f"step {first + index}")
