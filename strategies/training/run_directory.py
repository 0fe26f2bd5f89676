"""The directory of a run: which process may write there, and the files in it."""

import logging
import pathlib
from collections.abc import Mapping

from strategies.reports.metrics_log import evaluated_steps
from strategies.reports.summary import read_outcome, write_summary
from strategies.training.checkpoint_files import check_writable
from strategies.training.checkpoints import Checkpoints
from strategies.training.run_lock import RunLock
from towers.errors import UserError

log = logging.getLogger(__name__)


class RunDirectory:
    """A directory that one run at a time writes.

    Attributes:
      model: the path of the exported model.
    """

    def __init__(self, path: pathlib.Path, checkpoints: Checkpoints):
        """Writes no files; `make` does.

        Args:
          path: path of the directory.
          checkpoints: its checkpoints.
        """
        self._path, self.model = path, path / "model.keras"
        self._checkpoints, self._lock = checkpoints, RunLock(path)
        self._summary, self._metrics = path / "summary.json", path / "metrics.jsonl"

    def lock(self, *, create: bool) -> None:
        """Keeps other runs out until `release`.

        Args:
          create: as for `RunLock.acquire`.

        Raises:
          UserError: another process writes there.
        """
        self._lock.acquire(create=create)

    def release(self) -> None:
        """Lets other runs in."""
        self._lock.release()

    def make(self, *, starts_anew: bool) -> pathlib.Path | None:
        """Creates and locks the directory, and checks that a checkpoint can be saved in it.

        Args:
          starts_anew: whether an earlier run's checkpoints are moved to another folder.

        Returns:
          The folder that they were moved to; None if there were none, or if they remain.

        Raises:
          UserError: the directory can't be created or written to, another process writes there, its disk has too
            little room, or it contains a model that no run exported.
        """
        check_writable(self._path)
        self._check_model()
        self.lock(create=True)
        aside = self._checkpoints.files.set_aside() if starts_anew else None
        self._checkpoints.prepare()
        return aside

    def _check_model(self) -> None:
        # An export replaces the file.
        files = self._checkpoints.files
        if self.model.exists() and not (self._summary.exists() or files.saved() or files.without_index()):
            raise UserError(
                f"{self.model}: no run exported this file, and training would overwrite it; move it, or choose "
                "another directory"
            )

    def evaluated_steps(self) -> set[int]:
        """The steps whose evaluation is in metrics.jsonl."""
        return evaluated_steps(self._metrics)

    def is_complete(self) -> bool:
        """Whether summary.json exists and says that the run was completed."""
        try:
            return read_outcome(self._summary) == "completed"
        except FileNotFoundError:
            return False
        except UserError as error:
            log.warning(f"{error} (now rewritten, without the losses and times of the training)")
            return False

    def write_summary(self, summary: Mapping) -> None:
        """Writes summary.json.

        Raises:
          UserError: it can't be written. If an error ended the run, this is only logged, so that the user sees the
            first error.
        """
        try:
            write_summary(summary, self._summary)
        except OSError as error:
            text = (
                f"{self._summary}: can't be written ({error.strerror}): make room on the disk, then start the run "
                "again"
            )
            if summary["outcome"] in ("completed", "interrupted"):
                raise UserError(text) from error
            log.warning(text)

    def files(self, *, saved_at: int, completed: bool) -> dict[str, pathlib.Path]:
        """The paths of the saved files, by kind, as for `FitResult`.

        Args:
          saved_at: the step of the newest checkpoint.
          completed: whether the run was completed, so that its model was exported.
        """
        files = {"checkpoint": self._checkpoints.files.prefix(saved_at)}
        if completed:
            files["model"] = self.model
        files["metrics"] = self._metrics
        files["summary"] = self._summary
        files["tensorboard"] = self._path / "tensorboard"
        return files
