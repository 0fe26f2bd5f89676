"""How all processes of a run save together: one writes files, the others send it the values that it lacks."""

import time

from strategies.contract import Strategy
from strategies.pieces import pieces_of
from strategies.training.checkpoints import Checkpoints


class Saving:
    """The saves of one process.

    Attributes:
      saved_at: the step of the newest checkpoint, or the step at which the run began.
    """

    def __init__(self, strategy: Strategy, checkpoints: Checkpoints | None, every_seconds: float | None):
        """Args:
        strategy: the strategy to save, at the step at which the run begins.
        checkpoints: the checkpoints to write; None in a process without files.
        every_seconds: seconds between saves; None for no such period.
        """
        self._strategy, self._checkpoints, self._every_seconds = strategy, checkpoints, every_seconds
        self._note()

    def _note(self) -> None:
        self.saved_at, self._saved_time = self._strategy.step, time.monotonic()

    @property
    def is_late(self) -> bool:
        """Whether this process writes files, and its last save is longer ago than the period."""
        late = self._every_seconds is not None and time.monotonic() - self._saved_time >= self._every_seconds
        return late and self._checkpoints is not None

    def save(self) -> None:
        """Saves, unless this step is already saved. All processes must call it: others may hold some values."""
        here = self._checkpoints is not None
        is_new = here and (self.saved_at != self._strategy.step or not self._checkpoints.files.saved())
        if self._strategy.agree_to_save(is_new):
            if here:
                self._checkpoints.save()
            else:
                self._send_to_writer()
        if here:
            self._note()

    def _send_to_writer(self) -> None:
        """Saving in a process without files: sends the writer the values that it lacks."""
        self._strategy.begin_saving()
        for _ in self._strategy.values(pieces_of(self._strategy.checkpointables())):
            pass
