"""Which checkpoint a run resumes from, and the messages to the user about it."""

from collections.abc import Callable, Mapping

from strategies.contract import Strategy
from strategies.pieces import Piece
from strategies.run_settings import Plain, changes
from strategies.training.checkpoints import Checkpoints
from strategies.training.trainer_options import TrainerOptions


class Resuming:
    """How one process of a run resumes. Writes nothing."""

    def __init__(
        self,
        strategy: Strategy,
        options: TrainerOptions,
        *,
        checkpoints: Checkpoints | None,
        settings: Mapping[str, Plain],
    ):
        """Args:
        strategy: the strategy that is restored.
        options: options of the run; `resume` selects the checkpoint.
        checkpoints: checkpoints of the run's directory; None in a process without files.
        settings: the run's settings, which are compared with those in the checkpoint.
        """
        self._strategy, self._options, self._checkpoints = strategy, options, checkpoints
        self._settings = settings
        self._saved_settings: Mapping[str, object] = {}

    def restore(self) -> int | None:
        """Restores the strategy, in all its processes.

        Returns:
          The checkpoint's step; None if the run starts at step 0.

        Raises:
          UserError: the checkpoint is of another model, or can't be read.
        """
        step, read = self._restore_here() if self._strategy.keeps_files else (None, None)
        return self._strategy.share_restored(step, read)

    def _restore_here(self) -> tuple[int | None, Callable[[Piece], object] | None]:
        """The step of the restored checkpoint, and the function that reads its pieces; None for none."""
        resume = self._options.resume
        if resume == "never":
            return None, None
        if resume != "auto":
            found = Checkpoints(resume, self._strategy)
            step = found.restore_from(resume)
        elif (found := self._checkpoints) is not None:
            step = found.restore_latest()
        else:
            return None, None
        self._saved_settings = found.restored_settings
        return step, found.read

    def changes(self) -> list[str]:
        """The settings that differ from those in the checkpoint, such as 'batch_size was 32, is 64'."""
        return changes(self._saved_settings, self._settings)

    def notice(self, step: int, last_step: int) -> str:
        """A line for the user: where the run resumes, or that it is complete and what to type instead.

        Args:
          step: the step that was restored.
          last_step: number of steps after which training ends.
        """
        changed = self.changes()
        since = f"; changed since it was saved: {', '.join(changed)}" if changed else ""
        if step < last_step:
            return f"resumed at step {step} of {last_step}{since}"
        steps = self._strategy.steps_per_epoch
        longer = f"steps={step}" if self._options.epochs is None else f"epochs={step / steps:g}"
        return (
            f"complete at step {step}, nothing to do{since}; to train longer, use more than {longer}; to train "
            "from step 0, use resume='never' or another directory"
        )
