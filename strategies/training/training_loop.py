"""A run from its first step to its last: what happens between two calls of a strategy, and in which order."""

import contextlib
import pathlib
from collections.abc import Callable, Collection, Sequence

from strategies.callbacks import Callback, boundaries_of
from strategies.contract import Move, StepReport, Strategy
from strategies.errors import PeerLost
from strategies.reports.summary import RunFigures
from strategies.training.cadence import Cadence, due, steps_of_a_call
from strategies.training.export import save_model
from strategies.training.saving import Saving
from strategies.training.trainer_options import TrainerOptions


class TrainingLoop:
    """The loop of one process. All processes of the run execute it together and agree on each move."""

    def __init__(
        self,
        strategy: Strategy,
        options: TrainerOptions,
        *,
        last_step: int,
        saving: Saving,
        callbacks: Sequence[Callback],
        figures: RunFigures,
        model_path: pathlib.Path | None,
        evaluated_steps: Callable[[], Collection[int]] | None,
        stop_requested: Callable[[], bool],
    ):
        """Args:
        strategy: the strategy that trains, at the step at which the run begins.
        options: how often the run evaluates, saves and reports.
        last_step: number of steps after which training ends.
        saving: the saves of this process.
        callbacks: called for each report and evaluation.
        figures: one of the callbacks, which gives the time of steps.
        model_path: the file that the trained model is exported to; None in a process without files.
        evaluated_steps: reads the steps whose evaluation is in the run's files; None in a process without files.
        stop_requested: as for `Trainer`.
        """
        self._strategy, self._options, self._last_step = strategy, options, last_step
        self._saving, self._callbacks, self._figures = saving, callbacks, figures
        self._model_path, self._stop_requested = model_path, stop_requested
        self._evaluation_periods = options.evaluation_periods(strategy.steps_per_epoch)
        # A signal may stop an evaluation, and a run may be killed during one; its checkpoint is of the same step.
        step = strategy.step
        is_due = step > 0 and due(step - 1, step, *self._evaluation_periods)
        self._lacks_evaluation = is_due and evaluated_steps is not None and step not in evaluated_steps()

    def run(self) -> bool:
        """Trains, saves, exports and evaluates; False if training was stopped before the end.

        Raises:
          NonFiniteStep: a step was not finite under on_nan='stop'; it is not saved.
          PeerLost: another process of the run was lost.
          UserError: the data can't be used, or a file can't be written.
        """
        if not self._train():
            return False
        # The trained values are saved before anything else can fail.
        self._save()
        if self._agreed_move(0).stop:
            return False
        self._strategy.collect_parameters()
        if self._model_path is not None:
            save_model(self._strategy.portable_model(), self._model_path)
        self._strategy.release()
        if not self._evaluate():
            return False
        # No process ends while another may still need it.
        self._agreed_move(0)
        return True

    def _train(self) -> bool:
        """Trains to the last step; False if training was stopped before."""
        cadence, steps_a_call = self._cadence(), 1
        while (before := self._strategy.step) < self._last_step:
            move = self._agreed_move(cadence.call_length(before, steps_a_call), cadence)
            if move.save or move.stop:
                self._save()
            if move.stop:
                self._report_steps_since(before)
                return False
            if move.evaluate:
                self._lacks_evaluation = not self._evaluate()
                continue
            self._run_to(move.target)
            reached = self._strategy.step
            if reached in cadence.boundaries:
                self._settle()
            steps_a_call = self._next_call_length()
            if due(before, reached, self._options.checkpoint_every_steps):
                self._save()
            # The last evaluation comes after the last save and the export.
            if reached < self._last_step and due(before, reached, *self._evaluation_periods):
                self._evaluate()
        return True

    def _report_steps_since(self, step: int) -> None:
        """Reports steps that workers of parameter servers computed until a run that stops was saved."""
        if self._strategy.step > step:
            self._agreed_move(0)  # no worker continues from here
            self._run_to(self._strategy.step)

    def _cadence(self) -> Cadence:
        return self._cadence_of(
            *(self._options.checkpoint_every_steps, self._options.report_every_steps, *self._evaluation_periods),
            boundaries=tuple(step for callback in self._callbacks for step in boundaries_of(callback)),
        )

    def _cadence_of(self, *periods: int | None, boundaries: tuple[int, ...] = ()) -> Cadence:
        known = tuple(period for period in periods if period is not None)
        return Cadence(last_step=self._last_step, periods=known, boundaries=boundaries)

    def _agreed_move(self, num_steps: int, cadence: Cadence | None = None) -> Move:
        """The next move of all processes; this process wants to run `num_steps` more steps."""
        step = self._strategy.step
        return self._strategy.agree(
            Move(
                stop=self._stop_requested(),
                save=self._saving.is_late,
                evaluate=self._lacks_evaluation,
                target=step + num_steps,
                last_step=self._last_step,
                until=step if cadence is None else cadence.next_end(step),
                evaluation=self._cadence_of(*self._evaluation_periods).next_end(step),
                checkpoint=self._cadence_of(self._options.checkpoint_every_steps).next_end(step),
                stop_requested=self._stop_requested,
            )
        )

    def _run_to(self, target: int) -> None:
        # Asynchronous workers may have continued while the run was saved, even to the target.
        count = max(0, target - self._strategy.step)
        for callback in self._callbacks if count else ():
            callback.before_steps(self._strategy.step)
        try:
            report = self._strategy.start_steps(count)
        except Exception:
            self._settle()  # earlier steps count, and so does their error
            raise
        if report is not None and report.num_steps:
            self._tell(report)

    def _settle(self) -> None:
        """Reports all started steps. Call it before anything that needs their values or their number."""
        while (report := self._strategy.settle()) is not None:
            self._tell(report)

    def _tell(self, report: StepReport) -> None:
        for callback in self._callbacks:
            callback.steps(report)

    def _next_call_length(self) -> int:
        if self._options.report_every_steps is not None:
            return self._options.report_every_steps
        seconds = self._figures.seconds_a_step
        return 1 if seconds is None else steps_of_a_call(seconds)

    def _evaluate(self) -> bool:
        """Evaluates and reports the result, if there are evaluation data; returns False if a signal stopped it."""
        self._settle()
        if not self._strategy.evaluates:
            return True
        try:
            metrics = self._strategy.evaluate(stop_requested=self._stop_requested)
        except PeerLost:
            raise  # saving may need the lost process
        except Exception:
            # Another process may have failed with another error: the first error counts.
            with contextlib.suppress(PeerLost):
                self._save()
            raise
        if metrics is None:
            return False
        for callback in self._callbacks:
            callback.evaluation(self._strategy.step, metrics)
        return True

    def _save(self) -> None:
        """Reports all started steps, then saves by `Saving.save`, unless this step is already saved."""
        self._settle()
        self._saving.save()
