"""The Trainer: runs any strategy to its last step, and saves its checkpoints, metrics, model and summary."""

import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import keras

from strategies.callbacks import Callback, Run, check_callbacks
from strategies.contract import Move, StepReport, Strategy, check_strategy
from strategies.errors import NonFiniteStep, PeerLost
from strategies.reports.metrics_log import MetricsLog
from strategies.reports.summary import RunFigures, read_outcome, summarize, write_summary
from strategies.reports.tensorboard_log import TensorBoardLog
from strategies.run_settings import changes, plain_settings
from strategies.training.cadence import Cadence, due, steps_of_a_call
from strategies.training.checkpoint_files import check_writable
from strategies.training.checkpoints import Checkpoints
from strategies.training.export import save_model
from strategies.training.run_lock import RunLock
from strategies.training.saving import Saving
from strategies.training.stop_signals import StopSignals
from strategies.training.trainer_options import TrainerOptions
from towers.errors import UserError, check_kind

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of `Trainer.fit`.

    Attributes:
      completed: False if training was stopped before the last step.
      step: number of steps done, including those of earlier runs.
      loss: loss of the last report; None if no step was left to do.
      evaluation: metrics of the last evaluation; None if there was none: training was stopped before, or the task
        has no evaluation data.
      evaluated_step: the step that it evaluated; None if there was none.
      summary: as in summary.json.
      tables: lines for a person, the totals of what only this mode reports.
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
          UserError: epochs are given, and the number of training examples is unknown; or an argument is of another
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
        self._last_report: StepReport | None = None
        keeps = options.directory is not None and not options.dry_run and strategy.keeps_files
        self.directory = pathlib.Path(options.directory).absolute() if keeps else None
        self._last_step = 2 if options.dry_run else options.num_steps(strategy.steps_per_epoch)
        self._lock = None if self.directory is None else RunLock(self.directory)
        self._checkpoints, self._run_settings, self._saved_settings = None, {}, {}
        own: list[Callback] = [self._figures]
        if self.directory is not None:
            self._run_settings = plain_settings(
                {"epochs": options.epochs, "steps": self._last_step, **strategy.settings}
            )
            self._checkpoints = Checkpoints(
                self.directory / "checkpoints",
                strategy,
                keep=options.keep_checkpoints,
                settings=self._run_settings,
            )
            own += [MetricsLog(), TensorBoardLog()]
        self._callbacks = [*own, *callbacks]
        self._prepared, self._resumed_from = False, None
        self._notices: list[str] = []

    def fit(self) -> FitResult:
        """Trains to the last step, writes the checkpoint and the model, evaluates, and writes the summary.

        If an evaluation fails, all that was trained is saved. SIGTERM, SIGINT and SIGHUP save before they take
        effect.

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
        self._stop_requested = stop_requested
        with contextlib.ExitStack() as ends:
            if self._lock is not None:
                ends.callback(self._lock.release)
            self.prepare()
            run = self._run()
            outcome, started = "failed", time.monotonic()
            for callback in self._callbacks:
                callback.begin(run)
                ends.callback(callback.end)
            try:
                self._send_notices()
                completed = self._run_to_end()
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
            files=self._files(completed),
        )

    def _run(self) -> Run:
        return Run(
            strategy=self.strategy,
            directory=self.directory,
            first_step=self.strategy.step,
            last_step=self._last_step,
        )

    def _summarize(self, outcome: str, seconds: float) -> Mapping:
        summary = summarize(
            self._figures, self.strategy, outcome=outcome, settings=self._settings, seconds=seconds
        )
        if self.directory is not None and not self._is_already_summarized():
            self._write_summary(summary)
        return summary

    def _is_already_summarized(self) -> bool:
        """Whether a finished run was started again: it trains nothing, and its summary.json must remain."""
        if self.strategy.step < self._last_step or self._figures.first_seconds is not None:
            return False
        try:
            return read_outcome(self.directory / "summary.json") == "completed"
        except FileNotFoundError:
            return False
        except UserError as error:
            log.warning(f"{error} (now written anew, without the losses and times of the training)")
            return False

    def _write_summary(self, summary: Mapping) -> None:
        path = self.directory / "summary.json"
        try:
            write_summary(summary, path)
        except OSError as error:
            text = f"{path}: can't be written ({error.strerror}): make room on the disk, then start the run again"
            if summary["outcome"] in ("completed", "interrupted"):
                raise UserError(text) from error
            # The error that ended the run is the one that the user must see.
            log.warning(text)

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
          RuntimeError: workers of a ring have parts of them (zero=3); the run's own export has all.
        """
        return self.strategy.portable_model()

    def restore(self) -> int | None:
        """Restores the strategy, in all its processes, from the checkpoint that `resume` selects. Writes nothing.

        Returns:
          The checkpoint's step; None if the run starts at step 0.
        """
        step, read = self._restore_here() if self.strategy.keeps_files else (None, None)
        return self.strategy.share_restored(step, read)

    def _restore_here(self) -> tuple[int | None, Callable | None]:
        """The step of the checkpoint that was restored, and what reads its pieces; None for none."""
        if self.options.resume == "never":
            return None, None
        if self.options.resume != "auto":
            found = Checkpoints(self.options.resume, self.strategy)
            step = found.restore_from(self.options.resume)
        elif (found := self._checkpoints) is not None:
            step = found.restore_latest()
        else:
            return None, None
        self._saved_settings = found.restored_settings
        return step, found.read

    def prepare(self) -> int | None:
        """Restores the checkpoint to resume from, checks the options, and makes the directory.

        `fit` calls this if it was not called before. All that can be checked is checked before anything is
        written.

        Returns:
          The checkpoint's step; None if the run starts at step 0.
        """
        if self._lock is not None:
            # Before the checkpoints are read: another run may remove them. A new directory is locked when it is
            # made, after all is checked.
            self._lock.acquire(create=self._prepared)
        if not self._prepared:
            self._resumed_from = self.restore()
            self._prepared = True
            for callback in self._callbacks:
                callback.check(self._run())
            if self._checkpoints is not None:
                self._make_directory()
        return self._resumed_from

    def _make_directory(self) -> None:
        check_writable(self.directory)
        self._lock.acquire(create=True)
        if self.options.resume != "auto":
            aside = self._checkpoints.files.set_aside()
            if aside is not None:
                self._notices.append(f"the checkpoints of an earlier run were moved to {aside}")
        self._checkpoints.prepare()

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
        """Where this run resumes; for a run that was complete, that nothing is left and what to type instead."""
        step, last = self._resumed_from, self._last_step
        changed = changes(self._saved_settings, self._run_settings)
        since = f"; changed since it was saved: {', '.join(changed)}" if changed else ""
        if step < last:
            notice = f"resumed at step {step} of {last}{since}"
        else:
            steps = self.strategy.steps_per_epoch
            longer = f"steps={step}" if self.options.epochs is None else f"epochs={step / steps:g}"
            notice = (
                f"complete at step {step}, nothing to do{since}; to train longer, use more than {longer}; "
                "to train anew, use resume='never' or another directory"
            )
        if (changed or step >= last) and self.strategy.keeps_files and not self._shows_messages():
            log.warning(notice)
        return notice

    def _shows_messages(self) -> bool:
        """Whether a callback shows messages; a program of a user's own may have none."""
        return any(type(callback).message is not Callback.message for callback in self._callbacks)

    def _run_to_end(self) -> bool:
        """Trains, and returns whether the last step was reached; False if training was stopped before."""
        self._saving = Saving(self.strategy, self._checkpoints, self.options.checkpoint_every_seconds)
        cadence, steps_a_call = self._cadence(), 1
        while (before := self.strategy.step) < self._last_step:
            move = self._agreed_move(cadence.call_length(before, steps_a_call), cadence)
            if move.save or move.stop:
                self._save()
            if move.stop:
                return False
            self._run_to(move.target)
            reached = self.strategy.step
            if reached in cadence.boundaries:
                self._settle()
            steps_a_call = self._next_call_length()
            if due(before, reached, self.options.checkpoint_every_steps):
                self._save()
            # The last evaluation comes after the last save and the export.
            if reached < self._last_step and due(before, reached, *self._evaluation_periods):
                self._evaluate()
        # What was trained is saved before anything else can fail.
        self._save()
        if self._agreed_move(0).stop:
            return False
        self.strategy.collect_parameters()
        if self.directory is not None:
            self.export(self.directory / "model.keras")
        self.strategy.release()
        if not self._evaluate():
            return False
        # No process ends while another may still need it.
        self._agreed_move(0)
        return True

    def _agreed_move(self, num_steps: int, cadence: Cadence | None = None) -> Move:
        """What all processes do next; this process wants to run `num_steps` more steps."""
        step, last = self.strategy.step, self._last_step

        def next_of(periods: Sequence[int | None]) -> int:
            known = tuple(period for period in periods if period is not None)
            return step + Cadence(last_step=last, periods=known).call_length(step, last)

        return self.strategy.agree(
            Move(
                stop=self._stop_requested(),
                save=self._saving.is_late,
                target=step + num_steps,
                last_step=last,
                until=step if cadence is None else step + cadence.call_length(step, last),
                evaluation=next_of(self._evaluation_periods),
                checkpoint=next_of([self.options.checkpoint_every_steps]),
                stop_requested=self._stop_requested,
            )
        )

    def _run_to(self, target: int) -> None:
        # Asynchronous workers may have gone on while the run was saved, even to the target.
        count = max(0, target - self.strategy.step)
        for callback in self._callbacks if count else ():
            callback.before_steps(self.strategy.step)
        try:
            report = self.strategy.start_steps(count)
        except Exception:
            self._settle()  # the steps before it count, and so does their error
            raise
        if report is not None and report.num_steps:
            self._tell(report)

    def _settle(self) -> None:
        """Reports all steps that were started. What needs their values or their number calls it first."""
        while (report := self.strategy.settle()) is not None:
            self._tell(report)

    def _tell(self, report: StepReport) -> None:
        self._last_report = report
        for callback in self._callbacks:
            callback.steps(report)

    def _next_call_length(self) -> int:
        if self.options.report_every_steps is not None:
            return self.options.report_every_steps
        if not self._figures.rates:
            return 1  # the first step compiles: its time does not predict that of the others
        return steps_of_a_call(self._last_report.seconds / self._last_report.num_steps)

    def _cadence(self) -> Cadence:
        periods = (self.options.checkpoint_every_steps, self.options.report_every_steps)
        return Cadence(
            last_step=self._last_step,
            periods=(*(period for period in periods if period is not None), *self._evaluation_periods),
            boundaries=tuple(step for callback in self._callbacks for step in callback.boundaries()),
        )

    @property
    def _evaluation_periods(self) -> tuple[int, ...]:
        return self.options.evaluation_periods(self.strategy.steps_per_epoch)

    def _evaluate(self) -> bool:
        """Evaluates and reports it, if there are evaluation data; False if a signal stopped it."""
        self._settle()
        if not self.strategy.evaluates:
            return True
        try:
            metrics = self.strategy.evaluate(stop_requested=self._stop_requested)
        except PeerLost:
            raise  # saving may need the lost process
        except Exception:
            # Another process may have failed otherwise: the first error counts.
            with contextlib.suppress(PeerLost):
                self._save()
            raise
        if metrics is None:
            return False
        for callback in self._callbacks:
            callback.evaluation(self.strategy.step, metrics)
        return True

    def _save(self) -> None:
        """Saves, unless it is saved already; `Saving.save`, when all steps that were started are reported."""
        self._settle()
        self._saving.save()

    def _files(self, completed: bool) -> dict[str, pathlib.Path]:
        if self.directory is None:
            return {}
        files = {"checkpoint": self._checkpoints.files.prefix(self._saving.saved_at)}
        if completed:
            files["model"] = self.directory / "model.keras"
        files["metrics"] = self.directory / "metrics.jsonl"
        files["summary"] = self.directory / "summary.json"
        files["tensorboard"] = self.directory / "tensorboard"
        return files
