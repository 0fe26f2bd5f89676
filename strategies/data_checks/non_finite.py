"""Why a step or an evaluation is not finite: NaN in its data, labels out of range, or the training itself."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

from strategies.data_checks.first_batches import not_finite_parts
from strategies.data_checks.label_check import labels_out_of_range
from strategies.errors import NonFiniteStep
from towers.errors import UserError
from towers.mean_and_update import StepOutcome
from towers.task import Batch, Task

_LARGEST_FLOAT16 = float(np.finfo(np.float16).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causes:
    """Finds the cause in the data of all processes; each process checks its own part.

    Attributes:
      task: what is trained.
      model: its model, which is not run.
      all_true: returns whether a value is true in every process. All processes must call it equally often.
    """

    task: Task
    model: keras.Model
    all_true: Callable[[bool], bool]

    def of_step(self, step: int, found: StepOutcome, batches: Sequence[Batch]) -> NonFiniteStep:
        """The error of a step that was not finite.

        Args:
          step: index of the step.
          found: its outcome.
          batches: its (micro)batches.

        Raises:
          UserError: its labels are out of range.
        """
        what = f"loss {float(found.loss_sum / found.weight):g}, gradient norm {float(found.gradient_norm):g}"
        # The engine checks features only.
        parts = _unclean_parts(batches) or ([] if found.inputs_finite else ["features"])
        self.check_labels(batches, f"step {step}")
        if not self.all_true(not parts):
            named = " and ".join(parts or ["numbers"])
            cause = f"its batch holds NaN or infinite {named}: clean the data"
        elif not self.all_true(not self._are_beyond_float16(batches)):
            cause = (
                f"its batch holds features beyond float16's largest number, {_LARGEST_FLOAT16:,.0f}: scale them"
            )
        else:
            cause = "lower the learning rate or clip the gradients"
        return NonFiniteStep(
            f"step {step} is not finite ({what}) and was not applied: {cause}, or use on_nan='skip'",
            step=step,
        )

    def _are_beyond_float16(self, batches: Sequence[Batch]) -> bool:
        """Whether a model that computes in float16 casts features to infinity."""
        if self.model.compute_dtype != "float16":
            return False
        features = map(np.asarray, tf.nest.flatten([batch.features for batch in batches]))
        return any(one.dtype.kind == "f" and np.abs(one).max(initial=0) > _LARGEST_FLOAT16 for one in features)

    def check_labels(self, batches: Iterable[Batch], where: str) -> None:
        """Raises UserError, in all processes, if labels are out of range in one of them."""
        errors = (labels_out_of_range(self.task, self.model, batch, where) for batch in batches)
        error = next((error for error in errors if error is not None), None)
        if not self.all_true(error is None):
            raise error or UserError(f"{where}: labels in another worker's part are out of range: correct them")

    def check_evaluation_data(self, read: Callable[[], Iterable[Batch]]) -> None:
        """Raises UserError if the evaluation data, which `read` returns, are not finite, in any process."""
        found = ((index, not_finite_parts(batch)) for index, batch in enumerate(read()))
        index, parts = next(((index, parts) for index, parts in found if parts), (None, []))
        if self.all_true(not parts):
            self.check_labels(read(), "evaluation")
            return
        where = "another worker's part" if index is None else f"batch {index}"
        named = " and ".join(parts or ["numbers"])
        raise UserError(f"the evaluation data hold NaN or infinite {named}, in {where}: clean the data")


def _unclean_parts(batches: Sequence[Batch]) -> list[str]:
    """Which of 'features', 'labels' and 'weights' of some batches are not finite."""
    return sorted({name for batch in batches for name in not_finite_parts(batch)})
