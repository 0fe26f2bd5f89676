"""`python -m launch.slurm`: where it writes the script, and which calls it refuses."""

import pytest

from launch.manifests.slurm_script import Job, batch_script
from tests.launch.programs import run_many
from tests.launch.test_bad_input import assert_refused

TRAIN = ("python", "-m", "launch.train", "--strategy=ring", "--directory=runs/big")
TRAIN_ON_SERVERS = ("python", "-m", "launch.train", "--strategy=ps", "--directory=runs/big")
BEHIND = ("--", *TRAIN, "--nodes=x")
CALLS = {
    "to standard output": ["script", "--nodes=4", "--tasks_per_node=2", *BEHIND],
    "to a file": ["script", "--output=train.sbatch", *BEHIND],
    "a name that is no text": ["script", "--output=train.sbatch", *BEHIND, "\udcff"],
    "servers": ["script", "--tasks_per_node=4", "--ps=2", "--", *TRAIN_ON_SERVERS],
    "flags before the action": ["--nodes=4", "script", *BEHIND],
    "nothing": [],
    "another action": ["submit", *BEHIND],
    "no nodes": ["script", "--nodes=0", *BEHIND],
    "no command": ["script", "--nodes=4"],
    "nothing behind the dashes": ["script", "--"],
    "a command without dashes": ["script", "--nodes=4", "train.py"],
    "a file that is there": ["script", "--output=/dev/null", *BEHIND],
    "a file that cannot be": ["script", "--output=nowhere/train.sbatch", *BEHIND],
    "no directory": ["script", "--", "python", "train.py"],
}
REFUSED = {
    "flags before the action": ("'script' is no flag", "as in python -m launch.slurm script --nodes=2 -- "),
    "nothing": ("no action given", "script --nodes=2 --"),
    "another action": ("unknown action 'submit'", "'script'"),
    "no nodes": ("--nodes=0", "above 0"),
    "no command": ("no command given", "after --"),
    "nothing behind the dashes": ("no command given", "after --"),
    "a command without dashes": (
        "'train.py' is no flag",
        "put -- before the command, as in python -m launch.slurm script ",
    ),
    "a file that is there": ("--output=/dev/null", "is not overwritten"),
    "a file that cannot be": ("--output=nowhere/train.sbatch", "cannot write the file"),
    "no directory": ("python train.py", "--directory"),
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """How each call ended, and its folder."""
    found = run_many([("launch.slurm", flags) for flags in CALLS.values()], tmp_path_factory.mktemp("calls"))
    return dict(zip(CALLS, found, strict=True))


def test_to_standard_output(calls):
    ended, _ = calls["to standard output"]
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == batch_script(Job(nodes=4, tasks_per_node=2), [*TRAIN, "--nodes=x"])


def test_to_a_file(calls):
    ended, folder = calls["to a file"]
    assert (ended.code, ended.out) == (0, "train.sbatch: submit it with sbatch train.sbatch\n")
    assert (folder / "train.sbatch").read_text() == batch_script(Job(), [*TRAIN, "--nodes=x"])


def test_a_name_that_is_no_text(calls):
    ended, folder = calls["a name that is no text"]
    assert (ended.code, ended.err) == (0, "")
    assert b" '\xff'\n" in (folder / "train.sbatch").read_bytes()


def test_servers(calls):
    ended, _ = calls["servers"]
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == batch_script(Job(tasks_per_node=4, ps=2), TRAIN_ON_SERVERS)
    assert "TOWERS_SERVERS=2" in ended.out


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, calls):
    assert_refused(calls[name][0], REFUSED[name], "slurm")
