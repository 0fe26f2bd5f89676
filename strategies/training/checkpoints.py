"""Checkpoints: saved atomically, restored from the newest one that can be read; both piece by piece."""

import contextlib
import json
import logging
import pathlib
import re
import shutil
import tempfile
from collections.abc import Mapping

import tensorflow as tf

from strategies.atomic_write import UNFINISHED, flush, write_atomically
from strategies.contract import Strategy
from strategies.pieces import Piece, parts_of, pieces_of
from strategies.training.bundle import BundleWriter, read_piece, read_text
from towers.errors import UserError

_LAYOUT = "layout"
# Keys beside the layout's kinds.
_SETTINGS, _POSITIONS = "settings", "batch_positions"
_PREFIX = "step"
# The file that tf.train.latest_checkpoint reads.
_STATE = "checkpoint"
# Errors raised when a truncated, corrupted or partly deleted checkpoint is read.
_UNREADABLE = (tf.errors.OpError, RuntimeError, ValueError, LookupError, OSError)

log = logging.getLogger(__name__)


class Checkpoints:
    """The newest checkpoints of a run, `step-N.*` in one directory.

    Attributes:
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
        """Writes nothing: `prepare` and `save` do.

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
        """Makes the directory, and checks before training that a checkpoint can be saved in it.

        Raises:
          UserError: it can't be made or written to, or the disk has no room for one more checkpoint.
        """
        check_writable(self.directory)
        needed, free = 2 * self.size_bytes(), shutil.disk_usage(self.directory).free
        if free < needed:
            raise UserError(
                f"{self.directory}: {free:,} bytes are free and a checkpoint needs about {needed:,}: "
                "make room on the disk or choose another directory"
            )
        self._remove_unfinished()

    def save(self) -> str:
        """Saves the strategy's current values and returns the checkpoint's prefix.

        Older checkpoints are deleted only after this one is complete. All files are written to a temporary folder,
        flushed to the disk and then moved, the index last: a checkpoint with an index is complete. (TensorFlow
        itself writes the index in place, and a process that is killed meanwhile would leave half of it.)

        Raises:
          UserError: the checkpoint can't be written; its parts are removed, earlier checkpoints remain.
        """
        self._strategy.begin_saving()
        prefix = self.prefix(self._strategy.step)
        try:
            self._write(prefix)
            self._remove_old(prefix)
        except (tf.errors.OpError, OSError) as error:
            self._remove_unfinished()
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
        candidates = self.saved()
        self._report_missing_indices(newer_than=_step_of(candidates[0]) if candidates else -1)
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
        if remains := self._without_index():
            steps = ", ".join(map(str, remains))
            raise UserError(
                f"{self.directory}: remains of checkpoints at steps {steps}: without their index files none can "
                f"be read; put these back, or {instead}"
            )
        return None

    def _report_missing_indices(self, *, newer_than: int) -> None:
        if newer_than >= 0:
            for step in self._without_index():
                if step > newer_than:
                    log.warning("checkpoint %s has no index: trying the one before it", self.prefix(step))

    def _without_index(self) -> list[int]:
        """Steps of checkpoints whose index is gone, newest first.

        They have data, or the file for tf.train.latest_checkpoint names them. A save that was killed while it
        moved its files leaves its temporary folder too: that was no checkpoint yet.
        """
        steps = {_step_of(path) for path in self.directory.glob(f"{_PREFIX}-*.data-*")}
        state = self.directory / _STATE
        named = re.match(rf'model_checkpoint_path: "{_PREFIX}-(\d+)"', _text_of(state))
        if named:
            steps.add(int(named.group(1)))
        return sorted((step for step in steps if not self._is_saved_or_unfinished(step)), reverse=True)

    def _is_saved_or_unfinished(self, step: int) -> bool:
        # In this order: a save moves the index before it removes its folder.
        return step < 0 or _unfinished(self.prefix(step)).exists() or _index(self.prefix(step)).exists()

    def restore_from(self, path: str | pathlib.Path) -> int:
        """Restores one checkpoint and returns its step.

        Args:
          path: prefix of the checkpoint, one of its files, or a directory, whose newest checkpoint is restored.

        Raises:
          UserError: there is no checkpoint at `path`, it can't be read, or it is of another model.
        """
        path = pathlib.Path(path)
        if path.is_dir():
            found = Checkpoints(path, self._strategy)
            step = found.restore_latest()
            self.restored_settings, self._restored_prefix = found.restored_settings, found._restored_prefix
            if step is None:
                raise UserError(
                    f"resume={path}: this directory has no checkpoint; give another directory or a prefix"
                )
            return step
        prefix = re.sub(r"\.(index|data-\d+-of-\d+)$", "", str(path))
        if not pathlib.Path(prefix + ".index").exists():
            raise UserError(f"resume={path}: no such checkpoint; give a directory or a prefix like D/step-100")
        try:
            return self._restore(prefix)
        except UserError:
            raise
        except _UNREADABLE as error:
            raise UserError(
                f"resume={path}: the checkpoint can't be read ({_first_line(error)}); give another one"
            ) from error

    def saved(self) -> list[str]:
        """Prefixes of the checkpoints in the directory, newest first."""
        found = []
        for index in self.directory.glob(f"{_PREFIX}-*.index"):
            match = re.fullmatch(rf"{_PREFIX}-(\d+)\.index", index.name)
            if match:
                found.append((int(match.group(1)), str(index)[: -len(".index")]))
        return [prefix for _, prefix in sorted(found, reverse=True)]

    def prefix(self, step: int) -> pathlib.Path:
        """Prefix of the checkpoint of a step, whether it exists or not."""
        return self.directory / f"{_PREFIX}-{step}"

    def set_aside(self) -> pathlib.Path | None:
        """Moves an earlier run's checkpoints and their remains to a new folder `*.before-N`, which is returned.

        None if there are none.
        """
        if not self.saved() and not self._without_index():
            return None
        number = 1
        while (aside := self.directory.with_name(f"{self.directory.name}.before-{number}")).exists():
            number += 1
        self.directory.rename(aside)
        return aside

    def _write(self, prefix: pathlib.Path) -> None:
        aside = _unfinished(prefix)
        aside.mkdir(parents=True, exist_ok=True)
        self._write_files(aside / prefix.name)
        # No file of an unreadable checkpoint of the same step may be taken for a part of this one.
        _index(prefix).unlink(missing_ok=True)
        for written in _files(aside / prefix.name):
            flush(written)
            written.replace(prefix.with_name(written.name))
        flush(self.directory)
        shutil.rmtree(aside)

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

    def _remove_old(self, newest: pathlib.Path) -> None:
        """Deletes all but the newest checkpoints, and names the newest for tf.train.latest_checkpoint.

        Checkpoints of later steps than `newest` were unreadable when this run started: they are neither counted
        nor deleted. Data without an index is deleted only if it is older than all checkpoints that are kept.
        """
        found = self.saved()
        known = found[found.index(str(newest)) :]
        removed = known[self._keep :]
        if len(known) >= self._keep:
            oldest_kept = _step_of(known[self._keep - 1])
            removed += [str(self.prefix(step)) for step in self._without_index() if step < oldest_kept]
        write_atomically(self.directory / _STATE, f'model_checkpoint_path: "{newest.name}"\n')
        for old in removed:
            for file in reversed(_files(pathlib.Path(old))):
                file.unlink(missing_ok=True)

    def _restore(self, prefix: str) -> int:
        stored = json.loads(read_text(prefix, _LAYOUT))
        check_layout(prefix, stored, self._layout)
        self._restored_prefix = prefix
        for part in parts_of(self._contents):
            self._strategy.restore(part, self.read)
        self.restored_settings = stored.get(_SETTINGS, {})
        self._strategy.restored(stored.get(_POSITIONS))
        return self._strategy.step

    def _remove_unfinished(self) -> None:
        """Removes the files of a save that was killed or found the disk full.

        Data without an index is of such a save only if the save's temporary folder is there too.
        """
        found = [*self.directory.glob(_STATE + UNFINISHED)]
        for aside in self.directory.glob(f"{_PREFIX}-*{UNFINISHED}"):
            prefix = aside.with_name(aside.name.removesuffix(UNFINISHED))
            if not _index(prefix).exists():
                found += self.directory.glob(f"{prefix.name}.data-*")
            found.append(aside)
        for left in found:
            with contextlib.suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _step_of(path: str | pathlib.Path) -> int:
    """The step of a checkpoint's prefix or file; -1 for a file of another name."""
    match = re.match(rf"{_PREFIX}-(\d+)(\.|$)", pathlib.Path(path).name)
    return int(match.group(1)) if match else -1


def _text_of(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _unfinished(prefix: pathlib.Path) -> pathlib.Path:
    """The temporary folder in which a save writes a checkpoint."""
    return prefix.with_name(prefix.name + UNFINISHED)


def _index(prefix: pathlib.Path) -> pathlib.Path:
    return prefix.with_name(prefix.name + ".index")


def _files(prefix: pathlib.Path) -> list[pathlib.Path]:
    """The files of a checkpoint, the index last."""
    return [*prefix.parent.glob(f"{prefix.name}.data-*"), _index(prefix)]


def layout_of(contents: Mapping) -> dict:
    """Shapes of a checkpoint's variables by kind and name, without the counters, which every model has."""

    def shapes(node):
        if isinstance(node, Mapping):
            return {name: shapes(child) for name, child in node.items()}
        return node.shape.as_list()

    return {kind: shapes(node) for kind, node in contents.items() if kind != "counters"}


def check_layout(prefix: str, stored: Mapping, wanted: Mapping) -> None:
    """Raises UserError with the first difference if a checkpoint is of another model or update rule."""
    for kind in wanted:
        theirs, ours = stored.get(kind, {}), wanted[kind]
        for name in [*ours, *theirs]:
            if theirs.get(name) != ours.get(name):
                fix = (
                    "the same optimizer"
                    if kind == "slots" and name not in ours.keys() & theirs.keys()
                    else "the same model"
                )
                raise UserError(
                    f"checkpoint {prefix} is of another model: {kind}/{name} is {_described(theirs.get(name))} "
                    f"in it and {_described(ours.get(name))} here; use {fix} or another directory"
                )


def _described(shape) -> str:
    if shape is None:
        return "absent"
    return "present" if isinstance(shape, Mapping) else f"of shape {shape}"


def check_writable(directory: pathlib.Path) -> None:
    """Makes a directory and checks that a file can be written in it.

    Raises:
      UserError: the directory can't be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory) as probe:
            probe.write(b"0")
            probe.flush()
    except OSError as error:
        raise UserError(
            f"{directory}: nothing can be written there ({error.strerror}); "
            "make it writable or choose another directory"
        ) from error


def _first_line(error: BaseException) -> str:
    """First line of an error's message, without TensorFlow's names of operations."""
    text = re.sub(r"\{\{.*?\}\}\s*|\s*\[Op:\w+\]", "", str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:500]
