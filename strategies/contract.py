"""The contract between the Trainer and a strategy, and what a strategy reports."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import keras
import numpy as np
import tensorflow as tf

from strategies.engines import EngineChoice
from strategies.pieces import Piece
from towers.devices import Devices
from towers.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerTime:
    """How one worker spent its time over some steps.

    Attributes:
      name: 'worker:1' for the worker of rank 1.
      busy_seconds: seconds in which its own towers computed, without waiting for the other workers; 0 if they
        are on GPUs, which would wait for the clock.
      input_seconds: seconds spent waiting for its batches.
    """

    name: str
    busy_seconds: float
    input_seconds: float


class SectionTotals(Protocol):
    """A run's totals of one report section."""

    def add(self, section: "ReportSection") -> None:
        """Adds the section of one more report."""

    def summary(self) -> Mapping[str, object]:
        """The section's entry in summary.json."""

    def table(self) -> Sequence[str]:
        """The totals as lines for a person, printed at the end of the run."""


# Names of a line's other fields in metrics.jsonl: no metric of a task may have one of these names.
RESERVED_NAMES = frozenset(
    {
        *("kind", "step", "loss", "learning_rate", "gradient_norm", "skipped_steps", "examples", "seconds"),
        *("input_seconds", "images_per_second", "staleness"),
    }
)


class ReportSection(Protocol):
    """Figures that only some modes report, in the form of each kind of output."""

    def fields(self) -> Mapping[str, object]:
        """Fields added to the report's line in metrics.jsonl, by name."""

    def scalars(self) -> Mapping[str, float]:
        """TensorBoard scalars, by tag."""

    def histograms(self) -> Mapping[str, np.ndarray]:
        """Values of TensorBoard histograms, by tag."""

    def progress_line(self) -> str:
        """One line for the progress display."""

    def new_totals(self) -> SectionTotals:
        """Empty totals for sections of this kind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """Results of some consecutive steps, as plain numbers on the host.

    Attributes:
      step: number of steps done since the beginning of the run, including these.
      num_steps: number of steps in this report.
      examples: number of examples in these steps.
      loss: mean over the examples, each computed with the parameters of its own step; nan if no step was finite.
      metrics: means over the examples, by name.
      learning_rate: learning rate of the last step.
      gradient_norm: norm of the last step's mean gradient, before clipping.
      skipped: number of these steps whose update was not applied.
      seconds: wall time of these steps.
      input_seconds: part of `seconds` spent waiting for batches.
      workers: each worker's time, by rank; () where there is one process.
      sections: figures that only this mode reports, by the section's name.
    """

    step: int
    num_steps: int
    examples: int
    loss: float
    metrics: Mapping[str, float]
    learning_rate: float
    gradient_norm: float
    skipped: int
    seconds: float
    input_seconds: float
    workers: tuple[WorkerTime, ...] = ()
    sections: Mapping[str, ReportSection] = dataclasses.field(default_factory=dict)

    @property
    def examples_per_second(self) -> float:
        return self.examples / self.seconds if self.seconds > 0 else float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """What a Trainer wants to do next; all processes of a run must do the same.

    Attributes:
      stop: whether to save and end early.
      save: whether to save now.
      evaluate: whether to evaluate now, at the step where the run resumes: its files lack an evaluation due there.
      target: step at which the next call of `run_steps` ends: absolute, because workers may continue while the run
        is saved.
      last_step: step at which training ends.
      until: first step that must not start, because something is due before it.
      evaluation, checkpoint: steps at which the next ones are due; `last_step` for the last ones.
      stop_requested: whether this process was asked to stop; for a strategy that may wait in vain for other
        processes.
    """

    stop: bool
    save: bool
    target: int
    last_step: int
    until: int
    evaluation: int
    checkpoint: int
    evaluate: bool = False
    stop_requested: Callable[[], bool] = lambda: False


class Strategy(Protocol):
    """A mode of training: where the parameters live and how gradients are summed."""

    @property
    def name(self) -> str:
        """Name in the registry."""

    @property
    def step(self) -> int:
        """Number of global batches used so far, also by steps that `start_steps` has only started."""

    @property
    def examples(self) -> int:
        """Number of examples in these batches."""

    @property
    def batch_size(self) -> int:
        """Number of examples in a full global batch."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of batches in one pass over the training examples; None if it is not known in advance."""

    @property
    def evaluates(self) -> bool:
        """Whether the task has evaluation data; if not, `evaluate` must not be called."""

    @property
    def num_towers(self) -> int:
        """Number of towers of all workers."""

    @property
    def devices(self) -> Devices:
        """The devices of this process, with the parameters where the strategy has put them."""

    @property
    def is_exact(self) -> bool:
        """Whether its results are those of one device."""

    @property
    def engine_choice(self) -> EngineChoice | None:
        """The runtime of a mode of several processes, and the reason; None for the modes of one process."""

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings that determine the numbers: values and dataclasses (`strategies.run_settings`)."""

    @property
    def notices(self) -> list[str]:
        """Lines for the user about how the model is computed."""

    @property
    def keeps_files(self) -> bool:
        """Whether this process writes the run's files; one process of a run does."""

    def agree(self, move: Move) -> Move:
        """The move that all processes of the run make; each process passes the move that it wants.

        Raises:
          PeerLost: another process was lost; every method that communicates may raise it.
        """

    def agree_to_save(self, wanted: bool) -> bool:
        """Whether to collect for a checkpoint now. All processes call it at the same points.

        Args:
          wanted: whether this process is about to write one. If saving needs all processes, the one with
            `keeps_files` decides.
        """

    def begin_saving(self) -> None:
        """Called before `values`, in all processes that call it: may pause the run."""

    def values(self, pieces: Sequence[Piece]) -> Iterator[tf.Tensor | None]:
        """Yields the values of pieces of the checkpointables in the process with `keeps_files`.

        All processes in which `agree_to_save` was true call it with the same pieces and consume it; those without
        `keeps_files` get None. No process holds more than one piece of other processes' values.
        """

    def restore(self, part: Piece, read: Callable[[Piece], tf.Tensor]) -> None:
        """Sets a part of this process's checkpointables.

        Args:
          part: one of `strategies.pieces.parts_of`.
          read: reads the part, or one of its pieces, from a checkpoint; raises tf.errors.OpError if that is
            damaged. Parts of other processes are read too, so that a damaged checkpoint is not used.
        """

    def share_restored(self, step: int | None, read: Callable[[Piece], tf.Tensor] | None = None) -> int | None:
        """Sends all processes what the process with `keeps_files` has restored; returns its step.

        Args:
          step: step of the restored checkpoint; None if this process has restored nothing.
          read: as for `restore`; None if this process has restored nothing.
        """

    def run_steps(self, num_steps: int) -> StepReport:
        """Runs this many training steps and returns their report.

        Asynchronous workers may have run more steps by then, up to the agreed move's `until`. 0 reports the steps
        that they have run since the last report. There are fewer steps, perhaps none, if no worker is left and the
        agreed move has `stop_requested`.

        Raises:
          NonFiniteStep: a step was not finite, under on_nan=stop.
        """

    def start_steps(self, num_steps: int) -> StepReport | None:
        """As `run_steps`, but on GPUs it may return before these steps are done, so that the GPU need not wait.

        It then returns the report of the previous call, or None if that was already returned. Each call has one
        report, in order. After a step that stops the run, no step is applied.

        Raises:
          NonFiniteStep: a step of the call before, or of this one, was not finite, under on_nan=stop.
        """

    def settle(self) -> StepReport | None:
        """Waits for all started steps; returns the first report that was not returned yet, or None.

        Call it until it returns None before anything that needs a settled run: values, an evaluation, a
        checkpoint, `run_steps`.

        Raises:
          NonFiniteStep: a step was not finite, under on_nan=stop.
        """

    def evaluate(
        self, num_batches: int | None = None, *, stop_requested: Callable[[], bool] | None = None
    ) -> Mapping[str, float] | None:
        """Exact means of 'loss' and the task's metrics over the 'eval' split, or over its first `num_batches`.

        Args:
          num_batches: None for all.
          stop_requested: called before each batch; if it returns True in any process, all processes return None.
        """

    def checkpointables(self) -> Mapping[str, tf.Variable | Mapping]:
        """Everything that a checkpoint saves, nested by kind, by canonical and unsharded names.

        It has no effect on the run. Call `collect` before you read the variables; it is not needed before
        assignments.
        """

    def collect(self) -> None:
        """Fetches current values of all `checkpointables` to this process; may pause the run."""

    def collect_parameters(self) -> None:
        """Fetches the parameters for `portable_model` to the process with `keeps_files`. All processes call it."""

    def release(self) -> None:
        """Frees what `collect` or `collect_parameters` fetched and the run does not need here."""

    @property
    def batch_positions(self) -> Sequence[int] | None:
        """Index of each worker's next batch when `collect` was called; None if it follows from the step."""

    def restored(self, positions: Sequence[int] | None = None) -> None:
        """Must be called after the checkpointables were assigned: the run resumes from their values and step.

        Args:
          positions: the `batch_positions` that were saved with them.
        """

    def finish(self, completed: bool) -> None:
        """Called when training is over and all files are written: the other processes of the run may end.

        Args:
          completed: False if training was stopped before the last step.
        """

    def portable_model(self) -> keras.Model:
        """A new float32 Keras model of the task with the current parameters and state.

        Raises:
          RuntimeError: other processes hold some parameters; call `collect_parameters` first.
        """

    def check_savable(self) -> None:
        """Raises UserError if Keras can't write what `portable_model` returns to a file."""

    def graph(self) -> tf.Graph | None:
        """The graph of a training step for TensorBoard; None if there is none."""


def check_strategy(strategy: object) -> None:
    """Raises UserError if `strategy` is not a strategy (but, for example, the name of one)."""
    if isinstance(strategy, type) or not hasattr(strategy, "run_steps"):
        raise UserError(
            f"strategy is a {type(strategy).__name__}: must be a strategy; pass what "
            "strategies.registry.build_strategy(...) returns"
        )
