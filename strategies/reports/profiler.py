"""TensorFlow's profiler over a range of steps, for TensorBoard's profile page and trace viewers."""

import tensorflow as tf

from strategies.callbacks import Callback, Run, writing
from towers.errors import UserError


class Profiler(Callback):
    """Profiles the steps from `first` up to `last` into `profile/` in the run's directory."""

    def __init__(self, first: int, last: int):
        if not 0 <= first < last:
            raise UserError(f"profile_steps={first}:{last}: give FIRST:LAST with 0 <= FIRST < LAST")
        self._first, self._last, self._running = first, last, False

    def check(self, run: Run) -> None:
        if run.directory is None:
            raise UserError(
                f"profile_steps={self._first}:{self._last}: this run has no directory for the profile (a dry run "
                "writes no files); give a directory, or omit profile_steps"
            )
        if not run.first_step <= self._first < run.last_step:
            raise UserError(
                f"profile_steps={self._first}:{self._last}: this run has steps {run.first_step} to "
                f"{run.last_step - 1}; give a FIRST among them"
            )

    def begin(self, run: Run) -> None:
        self._directory = run.directory / "profile"

    def boundaries(self):
        return (self._first, self._last)

    def before_steps(self, step):
        if step == self._first:
            tf.profiler.experimental.start(str(self._directory))
            self._running = True

    def steps(self, report):
        if self._running and report.step >= self._last:
            self.end()

    def end(self):
        if self._running:
            self._running = False
            with writing(self._directory):
                tf.profiler.experimental.stop()
