"""The Trainer: a run of any strategy, from the checks before anything is written to the run's summary.

`resuming.py` restores, `run_directory.py` creates the directory and writes into it, `training_loop.py` trains,
saves and evaluates; callbacks get the reports.
"""

import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import keras

from strategies.callbacks import Callback, Run, check_callbacks
from strategies.contract import Strategy, check_strategy
from strategies.errors import NonFiniteStep
from strategies.reports.metrics_log import MetricsLog
from strategies.reports.summary import RunFigures, summarize
from strategies.reports.tensorboard_log import TensorBoardLog
from strategies.run_settings import Plain, plain_settings
from strategies.training.checkpoints import Checkpoints
from strategies.training.export import save_model
from strategies.training.resuming import Resuming
from strategies.training.run_directory import RunDirectory
from strategies.training.saving import Saving
from strategies.training.stop_signals import StopSignals
from strategies.training.trainer_options import TrainerOptions
from strategies.training.training_loop import TrainingLoop
from towers.errors import UserError, check_kind

log = logging.getLogger(__name__)

_STEPS_OF_A_DRY_RUN = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of `Trainer.fit`.

    Attributes:
      completed: False if training was stopped before the last step.
      step: number of steps done, including those of earlier runs.
      loss: loss of the last report; None if no step was left to do.
      evaluation: metrics of the last evaluation; None if there was none because training was stopped before, or
        the task has no evaluation data.
      evaluated_step: the step of the last evaluation; None if there was none.
      summary: as in summary.json.
      tables: lines for a person with the totals of figures that only this mode reports.
      files: paths of the saved files, by kind: 'checkpoint', 'model', 'metrics', 'summary', 'tensorboard'.
    """

    completed: bool
    step: int
    loss: float | None
    evaluation: Mapping[str, float] | None
    evaluated_step: int | None
    summary: Mapping
    tables: Sequence[str]
    files: Mapping[str, pathlib.Path]


class Trainer:
    """Runs a strategy step by step, evaluates, saves and reports."""

    def __init__(
        self,
        strategy: Strategy,
        options: TrainerOptions,
        *,
        callbacks: Sequence[Callback] = (),
        stop_requested: Callable[[], bool] | None = None,
        ended: Callable[[FitResult, StopSignals], None] | None = None,
        settings: Mapping | None = None,
    ):
        """Args:
        strategy: a strategy at step 0.
        options: length of the run, its files, and how often it evaluates, saves and reports.
        callbacks: called in addition to those that write the directory's files.
        stop_requested: called between calls of `run_steps` and between the batches of an evaluation; True saves a
          checkpoint and ends the run early. None asks for a stop at SIGTERM, SIGINT and SIGHUP, which take their
          usual effect when everything is saved.
        ended: called at the end of `fit` with its result and the signals, if stop_requested is None; it may exit.
        settings: written into summary.json as 'flags'.

        Raises:
          UserError: epochs are given but the number of training examples is unknown, or an argument has another
            type.
        """
        check_strategy(strategy)
        check_kind("options", options, TrainerOptions, "pass for example TrainerOptions(steps=100)")
        check_callbacks(callbacks)
        if stop_requested is not None and not callable(stop_requested):
            raise UserError(f"stop_requested={stop_requested!r}: must be a function that returns a bool, or None")
        self.strategy, self.options = strategy, options
        self._stop_requested, self._ended = stop_requested, ended
        self._settings = dict(settings or {})
        self._figures = RunFigures()
        keeps = options.directory is not None and not options.dry_run and strategy.keeps_files
        self.directory = pathlib.Path(options.directory).expanduser().absolute() if keeps else None
        steps = _STEPS_OF_A_DRY_RUN if options.dry_run else options.num_steps(strategy.steps_per_epoch)
        self._last_step = steps  # for a dry run preliminary, until `prepare` knows where the run begins
        own: list[Callback] = [self._figures]
        self._checkpoints: Checkpoints | None = None
        self._files: RunDirectory | None = None
        settings_of_run: Mapping[str, Plain] = {}
        if self.directory is not None:
            settings_of_run = plain_settings(
                {"epochs": options.epochs, "steps": self._last_step, **strategy.settings}
            )
            self._checkpoints = Checkpoints(
                self.directory / "checkpoints",
                strategy,
                keep=options.keep_checkpoints,
                settings=settings_of_run,
            )
            self._files = RunDirectory(self.directory, self._checkpoints)
            own += [MetricsLog(), TensorBoardLog()]
        self._resuming = Resuming(strategy, options, checkpoints=self._checkpoints, settings=settings_of_run)
        self._callbacks = [*own, *callbacks]
        self._prepared, self._resumed_from = False, None
        self._notices: list[str] = []

    def fit(self) -> FitResult:
        """Trains to the last step, writes the checkpoint and the model, evaluates, and writes the summary.

        If an evaluation fails, the trained model is already saved. At SIGTERM, SIGINT and SIGHUP it saves before
        they take effect.

        Raises:
          NonFiniteStep: a step was not finite under on_nan='stop'; the last checkpoint is of an earlier step.
          UserError: the directory can't be used, or the checkpoint is of another model.
        """
        if self._stop_requested is not None:
            return self._fit(self._stop_requested)
        with StopSignals() as signals:
            result = self._fit(signals.requested)
            if self._ended is not None:
                self._ended(result, signals)
        if not result.completed:
            signals.take_effect()
        return result

    def _fit(self, stop_requested: Callable[[], bool]) -> FitResult:
        with contextlib.ExitStack() as ends:
            if self._files is not None:
                ends.callback(self._files.release)
            self.prepare()
            run = self._run()
            outcome, started = "failed", time.monotonic()
            for callback in self._callbacks:
                callback.begin(run)
                ends.callback(callback.end)
            try:
                self._send_notices()
                saving = Saving(self.strategy, self._checkpoints, self.options.checkpoint_every_seconds)
                completed = self._loop(saving, stop_requested).run()
                outcome = "completed" if completed else "interrupted"
                self.strategy.finish(completed)
            except NonFiniteStep:
                outcome = "not_finite"
                raise
            finally:
                summary = self._summarize(outcome, time.monotonic() - started)
        return FitResult(
            completed=completed,
            step=self.strategy.step,
            loss=self._figures.loss,
            evaluation=self._figures.evaluated,
            evaluated_step=self._figures.evaluated_step,
            summary=summary,
            tables=self._figures.tables(),
            files={} if self._files is None else self._files.files(saved_at=saving.saved_at, completed=completed),
        )

    def _run(self) -> Run:
        return Run(
            strategy=self.strategy,
            directory=self.directory,
            first_step=self.strategy.step,
            last_step=self._last_step,
        )

    def _loop(self, saving: Saving, stop_requested: Callable[[], bool]) -> TrainingLoop:
        return TrainingLoop(
            self.strategy,
            self.options,
            last_step=self._last_step,
            saving=saving,
            callbacks=self._callbacks,
            figures=self._figures,
            model_path=None if self._files is None else self._files.model,
            evaluated_steps=None if self._files is None else self._files.evaluated_steps,
            stop_requested=stop_requested,
        )

    def _summarize(self, outcome: str, seconds: float) -> Mapping:
        summary = summarize(
            self._figures, self.strategy, outcome=outcome, settings=self._settings, seconds=seconds
        )
        # A finished run that is started again does not train, and its summary.json must remain.
        has_trained = self.strategy.step < self._last_step or self._figures.first_seconds is not None
        if self._files is not None and (has_trained or not self._files.is_complete()):
            self._files.write_summary(summary)
        return summary

    def evaluate(self) -> Mapping[str, float]:
        """Exact loss and metrics over the whole 'eval' split."""
        return self.strategy.evaluate()

    def export(self, path: str | pathlib.Path) -> pathlib.Path:
        """Saves the model as a `.keras` file, which loads without this project.

        Raises:
          UserError: the path does not end in .keras, or can't be written.
        """
        return save_model(self.model(), pathlib.Path(path))

    def model(self) -> keras.Model:
        """A new float32 Keras model with the current weights.

        Raises:
          RuntimeError: workers of a ring hold parts of the weights (zero=3); the run's own export has all weights.
        """
        return self.strategy.portable_model()

    def restore(self) -> int | None:
        """Restores the strategy, in all its processes, from the checkpoint that `resume` selects. Writes nothing.

        Returns:
          The checkpoint's step; None if the run starts at step 0.
        """
        return self._resuming.restore()

    def prepare(self) -> int | None:
        """Restores the checkpoint to resume from, checks the options, and creates the directory.

        `fit` calls this if it was not called before. All checks that are possible come before anything is written.

        Returns:
          The checkpoint's step; None if the run starts at step 0.
        """
        if self._files is not None:
            # Locked before the checkpoints are read, because another run may remove them. A new directory is
            # locked when it is created, after all checks.
            self._files.lock(create=self._prepared)
        if not self._prepared:
            self._resumed_from = self.restore()
            self._prepared = True
            if self.options.dry_run:
                self._last_step = (self._resumed_from or 0) + _STEPS_OF_A_DRY_RUN
            for callback in self._callbacks:
                callback.check(self._run())
            if self._files is not None:
                self.strategy.check_savable()
                aside = self._files.make(starts_anew=self.options.resume != "auto")
                if aside is not None:
                    self._notices.append(f"the checkpoints of an earlier run were moved to {aside}")
        return self._resumed_from

    def _send_notices(self) -> None:
        self._notices.append(f"devices of this process: {self.strategy.devices.described}")
        self._notices += self.strategy.notices
        if not self.strategy.evaluates:
            self._notices.append("the task has no evaluation data: nothing is evaluated")
        if self._resumed_from is not None:
            self._notices.append(self._resumption())
        for notice in self._notices:
            for callback in self._callbacks:
                callback.message(notice)

    def _resumption(self) -> str:
        """Where this run resumes, or that nothing is left to do; logs it if important and no callback shows it."""
        step, last = self._resumed_from, self._last_step
        notice = self._resuming.notice(step, last)
        must_be_read = step >= last or self._resuming.changes()
        if must_be_read and self.strategy.keeps_files and not self._shows_messages():
            log.warning(notice)
        return notice

    def _shows_messages(self) -> bool:
        """Whether a callback shows messages; a custom program may have none."""
        return any(type(callback).message is not Callback.message for callback in self._callbacks)
