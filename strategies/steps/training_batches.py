"""The training batches of a process, step after step; the batches of one step can be read again."""

from collections.abc import Callable

import tensorflow as tf

from strategies.data_checks.data_errors import input_error, readable_input
from towers.devices import HOST
from towers.errors import UserError
from towers.input.open_batches import OpenBatches
from towers.input.placed_input import PlacedInput
from towers.input.tower_parts import open_length
from towers.task import Batch


class TrainingBatches:
    """This process's part of each batch.

    Attributes:
      spec: the spec of a step's batch, or of the tuple of its microbatches, with dimension 0 open.
    """

    def __init__(self, dataset_from: Callable[[int], tf.data.Dataset]):
        """Args:
        dataset_from: function from a step to the batches from this step on.
        """
        self._dataset_from, self._first = dataset_from, dataset_from(0)
        self.spec = open_length(self._first.element_spec)
        self._open: OpenBatches | None = None
        # The step of the next batch; None if unknown.
        self._at: int | None = None

    def next(self, step: int, placed: PlacedInput | None) -> Batch:
        """The batch of a step. If it does not follow the previous step, the data are opened again.

        Args:
          step: index of the step.
          placed: sends parts of batches to the towers' devices ahead; None leaves them on the host.

        Raises:
          UserError: the data ended, or can't be read.
        """
        try:
            with readable_input("train", f"step {step}"), tf.device(HOST):
                batch = next(self._opened(step, placed))
        except StopIteration:
            raise _ended(step) from None
        self._at = step + 1
        return batch

    def error_of(self, error: tf.errors.OpError, step: int) -> UserError:
        """The error that `next` would raise for an error of `iterator` at a step."""
        is_end = isinstance(error, tf.errors.OutOfRangeError)
        return _ended(step) if is_end else input_error(error, "train", f"step {step}")

    def iterator(self, steps: range) -> tf.data.Iterator:
        """The iterator over batches on the host; the caller must take exactly the batches of these steps."""
        batches = self._opened(steps[0], None).batches
        self._at = steps.stop
        return batches

    def _opened(self, step: int, placed: PlacedInput | None) -> OpenBatches:
        """The batches from this step on. Opens the data again after an error or Ctrl-C, when positions differ."""
        at, self._at = self._at, None
        if self._open is None or at != step:
            dataset = self._from(step)
            with tf.device(HOST):
                self._open = OpenBatches(iter(dataset) if placed is None else placed.batches(dataset))
        return self._open

    def restart(self) -> None:
        """Allows any step as the next one."""
        self._open = None

    def again(self, step: int) -> list[Batch]:
        """The (micro)batches of a step, read again; empty if the data can be read only once."""
        batch = next(iter(self._from(step)), ())
        return [batch] if isinstance(batch, Batch) else list(batch)

    def _from(self, step: int) -> tf.data.Dataset:
        return self._first if step == 0 else self._dataset_from(step)


def _ended(step: int) -> UserError:
    return UserError(
        f"the training data ended at step {step}: the 'train' split must never end, and must restart at each "
        "reading; repeat() it, and give from_generator a function that makes a new generator"
    )
