"""What several tests here look at: runs that nothing disturbed."""

import dataclasses
import pathlib

import pytest

from tests.launch.programs import LIMIT_SECONDS, TINY, Ended, run
from tests.launch.workers import TRAIN, Workers


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run from beginning to end; look, don't touch.

    Attributes:
      directory: as in --directory.
      ended: how the program ended.
    """

    directory: pathlib.Path
    ended: Ended


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> FinishedRun:
    """`python -m launch.train` with the flags TINY, as in a shell."""
    folder = tmp_path_factory.mktemp("finished")
    ended = run("-m", "launch.train", *TINY, "--directory=run", cwd=folder)
    assert ended.code == 0, ended.err
    return FinishedRun(folder / "run", ended)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> pathlib.Path:
    """Directory of a run of two workers on this machine's loopback; look, don't touch."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Workers([TRAIN] * 2, cwd=folder) as workers:
        for ended in workers.ends(LIMIT_SECONDS):
            assert ended.code == 0, ended.err
    return folder / "run"
