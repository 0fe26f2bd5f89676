"""Options of a run: its length, its files, and how often it evaluates, saves and reports."""

import dataclasses
import math
import numbers
import os
import pathlib

from towers.errors import UserError, is_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Options of a run, except those of how a step computes.

    Attributes:
      steps, epochs: length of training, counted from the start of the first run; give exactly one of them.
      directory: folder of checkpoints, logs and the exported model; None: nothing is saved.
      resume: 'auto' resumes from the newest checkpoint in the directory; 'never' starts at step 0 and moves an
        earlier run's checkpoints to another folder; any other value is the checkpoint, or a folder of checkpoints,
        to resume from.
      checkpoint_every_seconds, checkpoint_every_steps: periods of checkpoints; None: no such period. The end of a
        run is always saved.
      keep_checkpoints: number of newest checkpoints that are not deleted.
      evaluate_every_epochs, evaluate_every_steps: periods of evaluations; None: no such period. The end of a run
        is always evaluated.
      report_every_steps: number of steps between reports; None: as many as take about half a second.
      dry_run: whether to run only two steps from where `resume` begins, and one evaluation, and to save nothing.

    Raises:
      UserError: not exactly one of steps and epochs is given, or an option is out of range or of another type.
    """

    steps: int | None = None
    epochs: float | None = None
    directory: str | pathlib.Path | None = None
    resume: str = "auto"
    checkpoint_every_seconds: float | None = 300.0
    checkpoint_every_steps: int | None = None
    keep_checkpoints: int = 3
    evaluate_every_epochs: float | None = 1.0
    evaluate_every_steps: int | None = None
    report_every_steps: int | None = None
    dry_run: bool = False

    def __post_init__(self):
        if (self.steps is None) == (self.epochs is None):
            raise UserError(f"steps={self.steps}, epochs={self.epochs}: give exactly one of them")
        for name in (
            "steps",
            "epochs",
            "checkpoint_every_seconds",
            "checkpoint_every_steps",
            "evaluate_every_epochs",
            "evaluate_every_steps",
            "report_every_steps",
        ):
            value = getattr(self, name)
            kind, rule = (numbers.Integral, "an integer") if name.endswith("steps") else (numbers.Real, "a number")
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise UserError(f"{name}={value!r}: must be {rule}; use for example {name}=1")
            if value is not None and not value > 0:
                raise UserError(f"{name}={value}: must be more than 0; omit it for the default")
        if not is_integer(self.keep_checkpoints):
            raise UserError(f"keep_checkpoints={self.keep_checkpoints!r}: must be an integer; use for example 3")
        if self.directory is not None and (
            not isinstance(self.directory, str | os.PathLike) or self.directory == ""
        ):
            raise UserError(f"directory={self.directory!r}: must be the path of a folder, or None to save nothing")
        if not isinstance(self.resume, str | os.PathLike):
            raise UserError(f"resume={self.resume!r}: must be 'auto', 'never', or the path of a checkpoint")
        for name in ("directory", "resume"):
            if "\0" in str(getattr(self, name)):
                raise UserError(
                    f"{name}={getattr(self, name)!r}: a path can't contain NUL characters; remove them"
                )
        for name in ("epochs", "evaluate_every_epochs"):
            if getattr(self, name) == math.inf:
                raise UserError(f"{name}=inf: must be finite; give a number of epochs, or steps")

    def num_steps(self, steps_per_epoch: int | None) -> int:
        """Number of steps after which training ends.

        Raises:
          UserError: epochs are given, and steps_per_epoch is None.
        """
        if self.steps is not None:
            return self.steps
        if steps_per_epoch is None:
            raise UserError(
                f"epochs={self.epochs}: the number of training examples is unknown; give steps instead"
            )
        return max(1, round(self.epochs * steps_per_epoch))

    def evaluation_periods(self, steps_per_epoch: int | None) -> tuple[int, ...]:
        """The periods of evaluations as numbers of steps; a dry run ignores those in epochs."""
        periods = [] if self.evaluate_every_steps is None else [self.evaluate_every_steps]
        if self.evaluate_every_epochs is not None and steps_per_epoch is not None and not self.dry_run:
            periods.append(max(1, round(self.evaluate_every_epochs * steps_per_epoch)))
        return tuple(periods)
