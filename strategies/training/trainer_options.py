"""How a run goes on: its length, its rhythm and what is kept."""

import dataclasses
import pathlib

from towers.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """How a run goes on, apart from how a step computes.

    Attributes:
      steps, epochs: where training ends, counted from the beginning of the first run; exactly one is given.
      directory: of checkpoints, logs and the exported model; None keeps nothing.
      resume: 'auto' goes on from the newest checkpoint in the directory, 'never' sets an earlier run's aside,
        and anything else is the checkpoint (or directory of them) to go on from.
      checkpoint_every_seconds, checkpoint_every_steps: whichever comes first; None is never. The end of a
        run is always saved.
      keep_checkpoints: how many stay.
      evaluate_every_epochs, evaluate_every_steps: None is only at the end.
      report_every_steps: steps between reports; None is about half a second's worth.
      dry_run: two steps and one evaluation, nothing kept.
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
            raise UserError(f"steps={self.steps}, epochs={self.epochs}: give one of them")
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
            if value is not None and not value > 0:
                raise UserError(f"{name}={value}: it is more than 0; leave it out for the default")

    def num_steps(self, steps_per_epoch: int | None) -> int:
        """Steps of the whole run, for where training ends and for a schedule over it.

        Raises:
          UserError: epochs of a set whose length is not known.
        """
        if self.steps is not None:
            return self.steps
        if steps_per_epoch is None:
            raise UserError(f"epochs={self.epochs}: the data's length is not known; give steps instead")
        return max(1, round(self.epochs * steps_per_epoch))
