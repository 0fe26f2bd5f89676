"""The batch script: what is in it, what it does with each exit code, and how it fares in a real Slurm."""

import os
import subprocess
import sys

import pytest

from launch import binary
from launch.slurm import Job, batch_script
from tests.launch.programs import run_many
from tests.launch.slurm_node import KILL_WAIT_SECONDS, needs_slurm, slurm_nodes, wait_until
from tests.launch.test_bad_input import assert_refused
from tests.towers.user_errors import refused

TRAIN = ("python", "-m", "launch.train", "--strategy=ring", "--directory=runs/big")
ALL = {
    "nodes": 4,
    "tasks_per_node": 2,
    "cpus_per_task": 8,
    "gpus_per_node": "a100:4",
    "time": "1-12:00:00",
    "partition": "gpu,gpu-large",
    "job_name": "big",
    "grace_seconds": 90,
}
OPTIONS = """\
#SBATCH --job-name=big
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=a100:4
#SBATCH --time=1-12:00:00
#SBATCH --partition=gpu,gpu-large
#SBATCH --signal=TERM@90
#SBATCH --open-mode=append
#SBATCH --requeue
"""
STEP = "srun --kill-on-bad-exit=1 --cpus-per-task=8 --gpu-bind=per_task:2 bash -c"

# Each runs what stands behind srun's own options, or notes how it was called.
PRETENDERS = {
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": '#!/bin/bash\necho "$@" >> scontrol.calls\n',
}


def executed(command, folder):
    """The script, run by bash with programs that pretend to be Slurm's."""
    pretenders = folder / "bin"
    pretenders.mkdir(exist_ok=True)
    for name, content in PRETENDERS.items():
        (pretenders / name).write_text(content)
        (pretenders / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{pretenders}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    return subprocess.run(
        ["bash"],
        input=batch_script(Job(), command),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_everything_asked_for_is_in_it():
    script = batch_script(Job(**ALL), TRAIN)
    # Slurm reads no option after the first command.
    assert script.startswith("#!/bin/bash\n" + OPTIONS)
    assert f'\n{STEP} "$task" task \\\n    {" ".join(TRAIN)}\n' in script


def test_nothing_else_is_in_it():
    script = batch_script(Job(), TRAIN)
    for absent in ("gpu", "cpus", "time=", "partition"):
        assert absent not in script
    assert "gpu-bind" not in batch_script(Job(gpus_per_node="4"), TRAIN)


@pytest.mark.parametrize("job", [Job(), Job(**ALL)])
@pytest.mark.parametrize("directory", ["runs/big", "a folder/it's $HOME"])
def test_bash_can_read_it(job, directory):
    script = batch_script(job, ["python", "x y.py", "--directory", directory])
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("code", [0, 1, 2, 4, 75, 143])
def test_what_it_does_with_an_exit_code(code, tmp_path):
    (tmp_path / "run").mkdir()
    done = executed(["bash", "-c", f"exit {code}", "command", "--directory=run"], tmp_path)
    assert (done.returncode, done.stderr) == (code, "")
    calls = tmp_path / "scontrol.calls"
    assert (calls.read_text() if calls.exists() else "") == ("requeue 7\n" if code == 75 else "")
    assert list((tmp_path / "run").iterdir()) == []


def test_an_old_note_says_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "interrupted-7").touch()
    assert executed(["true", "--directory=run"], tmp_path).returncode == 0
    assert not (tmp_path / "scontrol.calls").exists()


def test_the_command_comes_through_as_it_is(tmp_path):
    arguments = ["a b", "it's", "$HOME", '"', "", "\\", "new\nline", "*", "--", "{code}"]
    printing = "import sys; print(sys.argv[1:])"
    done = executed([sys.executable, "-c", printing, *arguments, "--directory=a folder/it's $HOME"], tmp_path)
    assert done.stdout == f"{[*arguments, '''--directory=a folder/it's $HOME''']}\n"


@pytest.mark.parametrize("given", [[], ["--directory="], ["--directory"], ["--data_dir=a"], ["directory=a"]])
def test_a_directory_is_needed(given):
    with refused("train", "no --directory", "add --directory=runs/NAME"):
        batch_script(Job(), ["train", *given])


@pytest.mark.parametrize("value", ["never", "runs/big/checkpoints/step-5"])
def test_a_run_that_would_begin_again_each_time(value):
    with refused(f"--resume={value}", "leave it out"):
        batch_script(Job(), [*TRAIN, f"--resume={value}"])
    assert batch_script(Job(), [*TRAIN, "--resume=auto"])


@pytest.mark.parametrize(
    "name, value",
    [
        ("time", "soon"),
        ("time", "1:2:3:4"),
        ("time", "60\n#SBATCH --exclusive"),
        ("partition", "two words"),
        ("job_name", "a\nrm -rf x"),
        ("job_name", ""),
        ("gpus_per_node", "all"),
        ("gpus_per_node", "0"),
        ("gpus_per_node", "a100:"),
    ],
)
def test_what_slurm_could_not_read(name, value):
    with refused(f"--{name}=", "Slurm could not read it"):
        batch_script(Job(**{name: value}), TRAIN)


def test_gpus_that_cannot_be_dealt_evenly():
    with refused("--gpus_per_node=a100:4", "3 tasks", "multiple of --tasks_per_node"):
        batch_script(Job(gpus_per_node="a100:4", tasks_per_node=3), TRAIN)


BEHIND = ("--", *TRAIN, "--nodes=x")
CALLS = {
    "to standard output": ["script", "--nodes=4", "--tasks_per_node=2", *BEHIND],
    "to a file": ["script", "--output=train.sbatch", *BEHIND],
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
    "flags before the action": ("'script' is no flag",),
    "nothing": ("nothing is asked for", "script --nodes=2 --"),
    "another action": ("'submit' is unknown", "'script'"),
    "no nodes": ("--nodes=0", "above 0"),
    "no command": ("no command", "after --"),
    "nothing behind the dashes": ("no command", "after --"),
    "a command without dashes": ("'train.py' is no flag",),
    "a file that is there": ("--output=/dev/null", "nothing is overwritten"),
    "a file that cannot be": ("--output=nowhere/train.sbatch", "can be written"),
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


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, calls):
    assert_refused(calls[name][0], REFUSED[name], "slurm")


# Stands for a training run on four workers, of which the first saves for all, long after the others are done.
PROGRAM = f"""
import os, pathlib, signal, sys, time
rank, folder = os.environ["SLURM_PROCID"], pathlib.Path("run")
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
if (folder / "saved").exists():
    print("went on", flush=True)
    sys.exit()
(folder / f"started-{{rank}}").touch()
deadline = time.monotonic() + 60
while not signals and time.monotonic() < deadline:
    if rank == "2" and (folder / "fail").exists():
        sys.exit(1)
    time.sleep(0.05)
if rank == "0" and not (folder / "fail").exists():
    time.sleep({KILL_WAIT_SECONDS} + 2)
    (folder / "saved").touch()
sys.exit({binary.INTERRUPTED})
"""


@pytest.fixture(scope="module")
def two_nodes():
    """A real Slurm of two nodes."""
    with slurm_nodes(("node2", "node10")) as slurm:
        yield slurm


@pytest.fixture
def running(two_nodes, tmp_path):
    """The number of a job whose four tasks wait in tmp_path."""
    (tmp_path / "run").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    script = batch_script(Job(nodes=2, tasks_per_node=2), [sys.executable, "program.py", "--directory=run"])
    (tmp_path / "job").write_text(script)
    submitted = two_nodes.run("sbatch", "--parsable", "--output=out", "job", cwd=tmp_path)
    assert submitted.code == 0, submitted.err
    wait_until(lambda: len(list((tmp_path / "run").glob("started-*"))) == 4, "four tasks", two_nodes)
    return submitted.out.strip()


def ended(slurm, number):
    """What Slurm says of a job when it is through."""
    through = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
    wait_until(lambda: slurm.job(number)["JobState"] in through, "the job's end", slurm)
    return slurm.job(number)


@needs_slurm
def test_an_interrupted_job_puts_itself_back_and_goes_on(running, two_nodes, tmp_path):
    """The signal is the one before the time is up. Three tasks end long before the fourth has saved."""
    assert two_nodes.run("scancel", "--signal=TERM", running).code == 0
    job = ended(two_nodes, running)
    out = (tmp_path / "out").read_text()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), out
    assert out.count("went on\n") == 4
    assert not list((tmp_path / "run").glob("interrupted-*"))


@needs_slurm
def test_a_task_that_fails_ends_the_job(running, two_nodes, tmp_path):
    """The others are stopped and save; the job stays a failed one, and does not fail again and again."""
    (tmp_path / "run" / "fail").touch()
    job = ended(two_nodes, running)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "1:0", "0")


@needs_slurm
def test_a_cancelled_job_stays_cancelled(running, two_nodes, tmp_path):
    assert two_nodes.run("scancel", running).code == 0
    assert ended(two_nodes, running)["JobState"] == "CANCELLED"
    wait_until(lambda: two_nodes.run("squeue", "--noheader").out == "", "an empty queue", two_nodes)
    assert two_nodes.job(running)["Restarts"] == "0"
    assert two_nodes.job(running)["JobState"] == "CANCELLED"
