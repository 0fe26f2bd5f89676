"""What the Trainer knows of a strategy, and what a strategy reports."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerTime:
    """How a worker spent some steps.

    Attributes:
      name: as 'worker:1'.
      busy_seconds: its own towers at work; waiting for the other workers is not in it.
      input_seconds: waiting for its batches.
    """

    name: str
    busy_seconds: float
    input_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFigures:
    """A worker of a parameter-server group, over some steps.

    Attributes:
      name: as 'worker:1'.
      steps: gradients of it that counted.
      failures: how often it was lost since the beginning of the run.
      busy_seconds: computing.
      input_seconds: waiting for its batches.
      staleness_sum, staleness_max: of its updates; the largest since the beginning.
    """

    name: str
    steps: int
    failures: int
    busy_seconds: float
    input_seconds: float
    staleness_sum: int
    staleness_max: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerFigures:
    """A parameter server, since the beginning of the run.

    Attributes:
      name: as 'ps:0'.
      kept_bytes: parameters and slots.
      pulls, pushes: questions answered.
      sent_bytes, received_bytes: by and from it.
    """

    name: str
    kept_bytes: int
    pulls: int
    pushes: int
    sent_bytes: int
    received_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServersReport:
    """A parameter-server group over some steps.

    Attributes:
      staleness: how many updates had each staleness: updates applied between an update's pull and its push.
      turned_away: gradients that came too late to count, since the beginning.
      absent: names of workers that have not come, or were lost and are not back.
      workers: those that gave a gradient or were lost.
      servers: all of them.
    """

    staleness: Mapping[int, int]
    turned_away: int
    absent: tuple[str, ...]
    workers: tuple[WorkerFigures, ...]
    servers: tuple[ServerFigures, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """What some steps did, in plain host numbers.

    Attributes:
      step: steps done since the beginning of the run, these included.
      num_steps: how many steps this report is about.
      examples: examples in them.
      loss: mean over their examples, each at the parameters of its own step; nan if none was finite.
      metrics: means over their examples, by name.
      learning_rate: of the last step.
      gradient_norm: of the last step's mean gradient, before clipping.
      skipped: steps of these whose update was not applied.
      seconds: wall time of all of it.
      input_seconds: of that, time spent waiting for batches.
      workers: each worker's share of the time, by rank; () where there is one process.
      servers: of a parameter-server group; else None.
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
    servers: ServersReport | None = None

    @property
    def examples_per_second(self) -> float:
        return self.examples / self.seconds if self.seconds > 0 else float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """What a Trainer wants to do next; several processes must all do the same.

    Attributes:
      stop: save and end early.
      save: save now.
      num_steps: then run so many steps.
      last_step: where training ends.
      until: no step from this one on may begin: something is due before it.
    """

    stop: bool
    save: bool
    num_steps: int
    last_step: int
    until: int


class Strategy(Protocol):
    """A mode of training: where the parameters live and how gradients meet."""

    @property
    def name(self) -> str:
        """Name in the registry."""

    @property
    def step(self) -> int:
        """Global batches used so far."""

    @property
    def examples(self) -> int:
        """Examples in them."""

    @property
    def batch_size(self) -> int:
        """Examples in a full global batch."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches in one pass over the training examples; None when not known in advance."""

    @property
    def num_towers(self) -> int:
        """Towers over all workers."""

    @property
    def is_exact(self) -> bool:
        """Whether it gives the numbers of one device."""

    @property
    def notices(self) -> list[str]:
        """What a user should know of how the model is computed; a line each."""

    @property
    def keeps_files(self) -> bool:
        """Whether this process is the one that writes what is kept of a run."""

    def agree(self, move: Move) -> Move:
        """What all processes of the run do next; each calls it with its own wish.

        Raises:
          PeerLost: as every method that meets other processes.
        """

    def share_restored(self, step: int | None) -> int | None:
        """Gives all processes what the one that keeps files restored.

        Args:
          step: at which it was saved; None when nothing was restored, or not by this process.
        """

    def run_steps(self, num_steps: int) -> StepReport:
        """Runs that many training steps and blocks until their numbers are known.

        Processes that wait for nobody may be some steps further by then, up to the agreed move's `until`.

        Raises:
          NonFiniteStep: under on_nan=stop.
        """

    def evaluate(self, num_batches: int | None = None) -> Mapping[str, float]:
        """'loss' and the task's metrics over the 'eval' split (its first batches), exact means."""

    def checkpointables(self) -> Mapping[str, tf.Variable | Mapping]:
        """Everything a checkpoint keeps, nested by kind, by canonical and unsharded names."""

    def restored(self) -> None:
        """To be called after the checkpointables were given other values: the input begins at their step."""

    def finish(self, completed: bool) -> None:
        """Training is over, and everything kept: other processes of the run may end.

        Args:
          completed: False when it was asked to stop before the last step.
        """

    def portable_model(self) -> keras.Model:
        """A new float32 Keras model of the task with the present parameters and state."""

    def graph(self) -> tf.Graph | None:
        """The graph of a training step, for TensorBoard."""
