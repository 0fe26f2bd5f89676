"""Checkpoints: saved atomically, restored from the newest one that can be read; both piece by piece."""

import json
import logging
import pathlib
import re
import shutil
from collections.abc import Mapping

import tensorflow as tf

from strategies.contract import Strategy
from strategies.pieces import Piece, parts_of, pieces_of
from strategies.training.bundle import BundleWriter, read_piece, read_text
from strategies.training.checkpoint_files import CheckpointFiles, check_writable, reading, step_of
from strategies.training.checkpoint_layout import check_layout, layout_of
from towers.errors import UserError

_LAYOUT = "layout"
# Keys in a checkpoint besides the layout's kinds.
_SETTINGS, _POSITIONS = "settings", "batch_positions"
# Errors raised when a truncated, corrupted or partly deleted checkpoint is read.
_UNREADABLE = (tf.errors.OpError, RuntimeError, ValueError, LookupError, OSError)

log = logging.getLogger(__name__)


class Checkpoints:
    """The newest checkpoints of a run, `step-N.*` in one directory.

    Attributes:
      files: the files in the directory.
      restored_settings: the settings in the checkpoint that was restored; empty if none was, or if it has none.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        strategy: Strategy,
        *,
        keep: int = 3,
        settings: Mapping[str, object] | None = None,
    ):
        """Writes no files; `prepare` and `save` do.

        Args:
          directory: folder of the checkpoints.
          strategy: the strategy whose variables are saved and restored.
          keep: number of newest checkpoints that `save` does not delete.
          settings: JSON values by name, saved in each checkpoint.

        Raises:
          UserError: keep is below 1.
        """
        if keep < 1:
            raise UserError(f"keep_checkpoints={keep}: must be at least 1")
        self.directory = pathlib.Path(directory)
        self.files = CheckpointFiles(self.directory)
        self._strategy = strategy
        self._contents = strategy.checkpointables()
        self._layout = layout_of(self._contents)
        self._settings = dict(settings or {})
        self._keep = keep
        self._restored_prefix = ""
        self.restored_settings: Mapping[str, object] = {}

    def size_bytes(self) -> int:
        """Approximate size of one checkpoint."""
        return sum(
            variable.dtype.size * variable.shape.num_elements() for variable in tf.nest.flatten(self._contents)
        )

    def prepare(self) -> None:
        """Creates the directory, and checks before training that a checkpoint can be saved in it.

        Raises:
          UserError: the directory can't be created or written to, or the disk has no room for one more checkpoint.
        """
        check_writable(self.directory)
        needed, free = 2 * self.size_bytes(), shutil.disk_usage(self.directory).free
        if free < needed:
            raise UserError(
                f"{self.directory}: {free:,} bytes are free and a checkpoint needs about {needed:,}: "
                "make room on the disk or choose another directory"
            )
        self.files.remove_unfinished()

    def save(self) -> str:
        """Saves the strategy's current values and returns the checkpoint's prefix.

        Older checkpoints are deleted only after this one is complete.

        Raises:
          UserError: the checkpoint can't be written; its files are removed, earlier checkpoints remain.
        """
        self._strategy.begin_saving()
        prefix = self.files.prefix(self._strategy.step)
        try:
            with self.files.writing(prefix) as beside:
                self._write_files(beside)
            self.files.remove_old(prefix, keep=self._keep)
        except (tf.errors.OpError, OSError) as error:
            self.files.remove_unfinished()
            raise UserError(
                f"{self.directory}: the checkpoint of step {self._strategy.step} can't be written "
                f"({_first_line(error)}); earlier ones remain: make room on the disk, then start the run again"
            ) from error
        return str(prefix)

    def read(self, piece: Piece) -> tf.Tensor:
        """The values of a piece in the checkpoint that was restored."""
        return read_piece(self._restored_prefix, piece)

    def restore_latest(self) -> int | None:
        """Restores the newest readable checkpoint and returns its step; None if the directory has no checkpoint.

        A checkpoint that can't be read or has no index is reported in the log, and the next older one is used.

        Raises:
          UserError: the checkpoint is of another model or update rule, or there are checkpoints or remains of
            checkpoints, none of which can be read.
        """
        candidates = self.files.saved()
        self._report_missing_indices(newer_than=step_of(candidates[0]) if candidates else -1)
        for path in candidates:
            try:
                return self._restore(path)
            except UserError:
                raise
            except _UNREADABLE as error:
                log.warning("checkpoint %s can't be read (%s): trying the one before it", path, _first_line(error))
        instead = "start at step 0 with resume='never' or in another directory"
        if candidates:
            raise UserError(f"{self.directory}: none of its {len(candidates)} checkpoints can be read; {instead}")
        if remains := self.files.without_index():
            steps = ", ".join(map(str, remains))
            raise UserError(
                f"{self.directory}: remains of checkpoints at steps {steps}: without their index files none can "
                f"be read; put the index files back, or {instead}"
            )
        return None

    def _report_missing_indices(self, *, newer_than: int) -> None:
        if newer_than >= 0:
            for step in self.files.without_index():
                if step > newer_than:
                    log.warning("checkpoint %s has no index: trying the one before it", self.files.prefix(step))

    def restore_from(self, path: str | pathlib.Path) -> int:
        """Restores one checkpoint and returns its step.

        Args:
          path: prefix of the checkpoint, one of its files, or a directory, whose newest checkpoint is restored.

        Raises:
          UserError: there is no checkpoint at `path`, it can't be read, or it is of another model.
        """
        path = pathlib.Path(path)
        prefix = re.sub(r"\.(index|data-\d+-of-\d+)$", "", str(path))
        with reading(path, f"resume={path}"):
            is_directory, has_index = path.is_dir(), pathlib.Path(prefix + ".index").exists()
        if is_directory:
            found = Checkpoints(path, self._strategy)
            step = found.restore_latest()
            self.restored_settings, self._restored_prefix = found.restored_settings, found._restored_prefix
            if step is None:
                of_run = path / "checkpoints"
                instead = f"use resume={of_run}" if of_run.is_dir() else "give another directory or a prefix"
                raise UserError(f"resume={path}: this directory has no checkpoint; {instead}")
            return step
        if not has_index:
            raise UserError(f"resume={path}: no such checkpoint; give a directory or a prefix like D/step-100")
        try:
            return self._restore(prefix)
        except UserError:
            raise
        except _UNREADABLE as error:
            raise UserError(
                f"resume={path}: the checkpoint can't be read ({_first_line(error)}); give another one"
            ) from error

    def _write_files(self, prefix: pathlib.Path) -> None:
        described = self._layout | {_SETTINGS: self._settings}
        if (positions := self._strategy.batch_positions) is not None:
            described[_POSITIONS] = list(positions)
        writer = BundleWriter(prefix, {**self._contents, _LAYOUT: None})
        writer.add_text(_LAYOUT, json.dumps(described))
        pieces = pieces_of(self._contents)
        for piece, value in zip(pieces, self._strategy.values(pieces), strict=True):
            writer.add(piece, value)
        writer.close()

    def _restore(self, prefix: str) -> int:
        stored = json.loads(read_text(prefix, _LAYOUT))
        check_layout(prefix, stored, self._layout)
        self._restored_prefix = prefix
        for part in parts_of(self._contents):
            self._strategy.restore(part, self.read)
        self.restored_settings = stored.get(_SETTINGS, {})
        self._strategy.restored(stored.get(_POSITIONS))
        return self._strategy.step


def _first_line(error: BaseException) -> str:
    """First line of an error's message, without TensorFlow's names of operations."""
    text = re.sub(r"\{\{.*?\}\}\s*|\s*\[Op:\w+\]", "", str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:500]
