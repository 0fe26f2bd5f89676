"""Runs without faults that several tests here examine; each is made once for all test processes."""

import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence

import pytest

from tests.launch.programs import LIMIT_SECONDS, TINY, Ended, run
from tests.launch.workers import TRAIN, Workers


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A finished run, which tests must not change.

    Attributes:
      directory: the run's --directory.
      ends: how each process ended.
    """

    directory: pathlib.Path
    ends: Sequence[Ended]

    @property
    def ended(self) -> Ended:
        """How the run's only process ended."""
        [found] = self.ends
        return found


def made_once(name: str, make: Callable[[pathlib.Path], Sequence[Ended]], tmp_path_factory) -> FinishedRun:
    """The run that `make` writes to a folder's subfolder 'run'; the first test process to ask calls `make`."""
    base = tmp_path_factory.getbasetemp()
    # The processes of pytest-xdist have their folders in one folder.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, ends_file = shared / name, shared / f"{name}.json"
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ends_file.exists():
            # A test process that failed may have left the folder.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            ends = make(folder)
            assert all(ended.code == 0 for ended in ends), [ended.err for ended in ends]
            ends_file.write_text(json.dumps([dataclasses.asdict(ended) for ended in ends]))
    return FinishedRun(folder / "run", [Ended(**fields) for fields in json.loads(ends_file.read_text())])


@pytest.fixture
def unread_before(monkeypatch) -> None:
    """Programs with slow input skip the check of the first batches, which would take as long as many steps."""
    monkeypatch.setenv("DATA_IS_CHECKED", "1")


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> FinishedRun:
    """`python -m launch.train` with the flags TINY, as in a shell."""

    def make(folder: pathlib.Path) -> list[Ended]:
        return [run("-m", "launch.train", *TINY, "--directory=run", cwd=folder)]

    return made_once("finished", make, tmp_path_factory)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> FinishedRun:
    """A run of two workers on this machine's loopback."""

    def make(folder: pathlib.Path) -> list[Ended]:
        with Workers([TRAIN] * 2, cwd=folder) as workers:
            return workers.ends(LIMIT_SECONDS)

    return made_once("undisturbed", make, tmp_path_factory)
