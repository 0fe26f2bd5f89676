"""Callbacks of a Trainer. They are called between calls of `run_steps`, never during one."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from strategies.contract import StepReport, Strategy
from towers.errors import UserError, check_kind, is_integer

# The errors that TensorFlow raises if a file can't be written.
_UNWRITABLE = (
    tf.errors.ResourceExhaustedError,
    tf.errors.UnavailableError,
    tf.errors.PermissionDeniedError,
    tf.errors.FailedPreconditionError,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run at its start.

    Attributes:
      strategy: the strategy that trains.
      directory: folder of the run's files; None if nothing is saved.
      first_step: number of steps done before this run, by the runs that it resumes.
      last_step: number of steps after which training ends.
    """

    strategy: Strategy
    directory: pathlib.Path | None
    first_step: int
    last_step: int


class Callback:
    """Base class of callbacks: a Trainer calls these methods, which do nothing. Override those that you need."""

    def check(self, run: Run) -> None:
        """Called before anything is written: raises UserError if this callback can't work in this run."""

    def begin(self, run: Run) -> None:
        """Called before the first step."""

    def before_steps(self, step: int) -> None:
        """Called before a call of `run_steps` that starts at this step."""

    def boundaries(self) -> tuple[int, ...]:
        """Steps at which a call of `run_steps` must end."""
        return ()

    def steps(self, report: StepReport) -> None:
        """Called once for each call of `run_steps`, in order: after that call, or on GPUs after a later one.

        It is called before anything else at a step of `boundaries`, and before an evaluation or a checkpoint.
        """

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation."""

    def message(self, text: str) -> None:
        """Called with a line for the user, for example that a run was resumed."""

    def end(self) -> None:
        """Called after the last step, also when an error ended the run."""


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Context manager in which a callback writes a file or folder of the run.

    Raises:
      UserError: it can't be written, as on a full disk.
    """
    try:
        yield
    except (OSError, *_UNWRITABLE) as error:
        why = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise UserError(
            f"{path}: can't be written ({why}); saved checkpoints remain: "
            "make room on the disk or make it writable, then start the run again"
        ) from error


def check_callbacks(callbacks: object) -> None:
    """Raises UserError if `callbacks` is not a list of callbacks (but a single one, a class, or Keras's)."""
    if not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks={callbacks!r}: must be a list; pass callbacks=[callback], or omit it")
    for callback in callbacks:
        check_kind("a callback", callback, Callback, "derive its class from that one")


def boundaries_of(callback: Callback) -> tuple[int, ...]:
    """The result of `callback.boundaries`, checked.

    Raises:
      UserError: the result does not consist of integers.
    """
    returned = callback.boundaries()
    steps = tuple(returned) if isinstance(returned, Iterable) else (None,)
    if not all(is_integer(step) for step in steps):
        raise UserError(
            f"{type(callback).__name__}.boundaries() returned {returned!r}: must be steps, as integers; "
            "return for example (10, 20), or () for none"
        )
    return steps
