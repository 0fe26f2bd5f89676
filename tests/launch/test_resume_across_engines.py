"""Checkpoints of all engines have the same names and numbers, and every engine resumes from another's checkpoints.

Two servers save, three resume.
"""

import pathlib

import numpy as np
import pytest

from launch.binary import DONE
from tests.launch.nursery import nursery
from tests.launch.programs import checkpoint_values, environment
from tests.launch.server_groups import ServerGroup
from tests.launch.server_runs import LIMIT_SECONDS, PROGRAM, all_end
from tests.launch.workers import Workers

pytestmark = [pytest.mark.timeout(280), pytest.mark.full]

FIRST, LAST = 10, 20
# Asynchronous servers with one worker are exact, so all give the same numbers.
MODES = {
    "towers": ("--strategy=towers",),
    "ring, tensorflow": ("--strategy=ring", "--engine=tensorflow"),
    "ps, tensorflow": ("--strategy=ps", "--engine=tensorflow"),
    "ring, own": ("--strategy=ring", "--engine=own"),
    "ring, 2 towers of slices, zero 3": ("--strategy=ring", "--num_towers=2", "--grid=data:2,slice:2", "--zero=3"),
    "ps, own": ("--strategy=ps", "--engine=own"),
    "ring, zero 1": ("--strategy=ring", "--zero=1"),
}
QUICK_INPUT = {"SECONDS_PER_BATCH": "0"}


def train(mode: str, cwd: pathlib.Path, directory: str, steps: int) -> None:
    """Trains to `steps` in a mode; resumes if the directory has a checkpoint."""
    flags = (f"--steps={steps}", f"--directory={directory}", "--schedule=constant")
    command = (*PROGRAM, *MODES[mode], *flags)
    if "ring" in mode:
        quick = dict.fromkeys(range(2), QUICK_INPUT)
        with Workers([command] * 2, cwd=cwd, environments=quick) as workers:
            assert [ended.code for ended in workers.ends(LIMIT_SECONDS)] == [DONE] * 2
    elif "ps" in mode:
        servers = 2 if steps == FIRST else 3
        with ServerGroup(
            command, workers=1, servers=servers, cwd=cwd, variables={"worker:0": QUICK_INPUT}
        ) as group:
            all_end(group)
    else:
        files = [str(cwd / f"{directory}.{steps}.{kind}") for kind in ("out", "err")]
        alone = nursery().start(command, cwd=cwd, env={**environment(), **QUICK_INPUT}, files=files)
        assert alone.wait(LIMIT_SECONDS) == DONE, pathlib.Path(files[1]).read_text()


def assert_alike(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, pathlib.Path]:
    """A directory for each mode, with a run of that mode up to step FIRST."""
    found = {}
    for mode in MODES:
        cwd = tmp_path_factory.mktemp(mode.replace(", ", "_"))
        train(mode, cwd, "run", FIRST)
        found[mode] = cwd
    return found


def test_all_save_the_same(directories):
    wanted = checkpoint_values(directories["towers"] / "run", FIRST)
    assert len(wanted) >= 10
    for cwd in directories.values():
        assert_alike(checkpoint_values(cwd / "run", FIRST), wanted)


def test_each_resumes_from_another(directories):
    """All checkpoints are alike, so each mode resumes from one other mode's only."""
    modes = list(MODES)
    for saved, mode in zip(modes, [*modes[1:], modes[0]], strict=True):
        train(mode, directories[saved], "run", LAST)
    ends = [checkpoint_values(cwd / "run", LAST) for cwd in directories.values()]
    for end in ends[1:]:
        assert_alike(end, ends[0])
