"""The files of a run's checkpoints in one directory: which are complete, which are remains, which are removed.

A checkpoint with an index is complete: all files are written to a temporary folder, flushed to the disk and then
moved, the index last. (TensorFlow itself writes the index in place, so a process that is killed meanwhile would
leave half an index.)
"""

import contextlib
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator

from strategies.atomic_write import UNFINISHED, flush, write_atomically
from towers.errors import UserError

_PREFIX = "step"
# The file that tf.train.latest_checkpoint reads.
_STATE = "checkpoint"


class CheckpointFiles:
    """The files `step-N.*` of a directory."""

    def __init__(self, directory: pathlib.Path):
        self.directory = directory

    def saved(self) -> list[str]:
        """Prefixes of the checkpoints in the directory, newest first.

        Raises:
          UserError: the directory can't be read.
        """
        found = []
        with reading(self.directory, str(self.directory)):
            indices = list(self.directory.glob(f"{_PREFIX}-*.index"))
        for index in indices:
            match = re.fullmatch(rf"{_PREFIX}-(\d+)\.index", index.name)
            if match:
                found.append((int(match.group(1)), str(index)[: -len(".index")]))
        return [prefix for _, prefix in sorted(found, reverse=True)]

    def prefix(self, step: int) -> pathlib.Path:
        """Prefix of the checkpoint of a step, whether it exists or not."""
        return self.directory / f"{_PREFIX}-{step}"

    def set_aside(self) -> pathlib.Path | None:
        """Moves an earlier run's checkpoints and remains to a new folder `*.before-N`; returns the folder.

        None if there are none.
        """
        if not self.saved() and not self.without_index():
            return None
        number = 1
        while (aside := self.directory.with_name(f"{self.directory.name}.before-{number}")).exists():
            number += 1
        self.directory.rename(aside)
        return aside

    def without_index(self) -> list[int]:
        """Steps of checkpoints whose index is gone, newest first.

        They have data, or the file for tf.train.latest_checkpoint names them. A save that was killed while it
        moved its files also leaves its temporary folder: such files are not a checkpoint yet.
        """
        steps = {step_of(path) for path in self.directory.glob(f"{_PREFIX}-*.data-*")}
        state = self.directory / _STATE
        named = re.match(rf'model_checkpoint_path: "{_PREFIX}-(\d+)"', _text_of(state))
        if named:
            steps.add(int(named.group(1)))
        return sorted((step for step in steps if not self._is_saved_or_unfinished(step)), reverse=True)

    def _is_saved_or_unfinished(self, step: int) -> bool:
        # Checked in this order, because a save moves the index before it removes its folder.
        return step < 0 or _unfinished(self.prefix(step)).exists() or _index(self.prefix(step)).exists()

    @contextlib.contextmanager
    def writing(self, prefix: pathlib.Path) -> Iterator[pathlib.Path]:
        """Context manager: yields a temporary prefix, whose files are then flushed and moved to `prefix`.

        After an error the temporary files stay until `remove_unfinished`.
        """
        aside = _unfinished(prefix)
        aside.mkdir(parents=True, exist_ok=True)
        yield aside / prefix.name
        # So that no file of an unreadable checkpoint of the same step is taken for a part of this one.
        _index(prefix).unlink(missing_ok=True)
        for written in _files(aside / prefix.name):
            flush(written)
            written.replace(prefix.with_name(written.name))
        flush(self.directory)
        shutil.rmtree(aside)

    def remove_old(self, newest: pathlib.Path, *, keep: int) -> None:
        """Deletes all but the `keep` newest checkpoints, and names the newest for tf.train.latest_checkpoint.

        Checkpoints of later steps than `newest` were unreadable when this run started: they are neither counted
        nor deleted. Data without an index is deleted only if it is older than all checkpoints that are kept.
        """
        found = self.saved()
        known = found[found.index(str(newest)) :]
        removed = known[keep:]
        if len(known) >= keep:
            oldest_kept = step_of(known[keep - 1])
            removed += [str(self.prefix(step)) for step in self.without_index() if step < oldest_kept]
        write_atomically(self.directory / _STATE, f'model_checkpoint_path: "{newest.name}"\n')
        for old in removed:
            for file in reversed(_files(pathlib.Path(old))):
                file.unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Removes the files of a save that was killed or found the disk full.

        Data without an index belongs to such a save only if the save's temporary folder exists too.
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


def step_of(path: str | pathlib.Path) -> int:
    """The step of a checkpoint's prefix or file; -1 for a file of another name."""
    match = re.match(rf"{_PREFIX}-(\d+)(\.|$)", pathlib.Path(path).name)
    return int(match.group(1)) if match else -1


def _unfinished(prefix: pathlib.Path) -> pathlib.Path:
    """The temporary folder in which a save writes a checkpoint."""
    return prefix.with_name(prefix.name + UNFINISHED)


def _index(prefix: pathlib.Path) -> pathlib.Path:
    return prefix.with_name(prefix.name + ".index")


def _files(prefix: pathlib.Path) -> list[pathlib.Path]:
    """The files of a checkpoint, the index last."""
    return [*prefix.parent.glob(f"{prefix.name}.data-*"), _index(prefix)]


def _text_of(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


@contextlib.contextmanager
def reading(path: pathlib.Path, shown: str) -> Iterator[None]:
    """Context manager for code in which TensorFlow, or this process, looks for a checkpoint at a path.

    Args:
      path: path of a checkpoint or of a directory of checkpoints.
      shown: its name in the message.

    Raises:
      UserError: permission is denied, or TensorFlow can't look there because the name is not UTF-8.
    """
    try:
        str(path.absolute()).encode()
        yield
    except OSError as error:
        raise UserError(
            f"{shown}: can't be read ({error.strerror}); make it readable or choose another directory"
        ) from error
    except UnicodeEncodeError as error:
        raise UserError(
            f"{shown!a}: TensorFlow reads and writes only names in UTF-8, and this one is not; choose another "
            "one, or set a locale of UTF-8, as LC_ALL=C.UTF-8"
        ) from error


def check_writable(directory: pathlib.Path) -> None:
    """Creates a directory and checks that a file can be written in it.

    Raises:
      UserError: the directory can't be created or written to.
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
