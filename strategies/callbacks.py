"""What can look on while a Trainer works. Callbacks act between calls of `run_steps`, never inside one."""

import dataclasses
import pathlib
from collections.abc import Mapping

from strategies.contract import StepReport, Strategy
from towers.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run when it begins.

    Attributes:
      strategy: that does the work.
      directory: where files go; None when nothing is kept.
      first_step: steps done before (by the run that this one resumes).
      last_step: step at which training ends.
    """

    strategy: Strategy
    directory: pathlib.Path | None
    first_step: int
    last_step: int


class Callback:
    """Does nothing; override what is of interest."""

    def check(self, run: Run) -> None:
        """Before anything is written: raises UserError when this callback can't do its work in this run."""

    def begin(self, run: Run) -> None:
        """Before the first step."""

    def before_steps(self, step: int) -> None:
        """Before a call of run_steps that begins at this step."""

    def boundaries(self) -> tuple[int, ...]:
        """Steps that no call of run_steps may pass over."""
        return ()

    def steps(self, report: StepReport) -> None:
        """After a call of run_steps."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""

    def message(self, text: str) -> None:
        """Something the user should read: a checkpoint saved, a run resumed."""

    def end(self) -> None:
        """After the last step, also when an error ended the run."""


def unwritable(path: pathlib.Path, why: str) -> UserError:
    """What a callback raises whose file or folder can't be written."""
    return UserError(
        f"{path}: it can't be written ({why}); checkpoints are kept: make room, then run the same command again"
    )
