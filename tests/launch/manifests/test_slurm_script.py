"""The batch script: its text, what it does after each exit code, and how it runs in a real Slurm."""

import os
import re
import subprocess
import sys

import pytest

from launch import binary
from launch.manifests.slurm_script import Job, batch_script
from tests.launch.slurm_node import KILL_WAIT_SECONDS, needs_slurm, slurm_nodes, wait_until
from tests.towers.user_errors import refused

TRAIN = ("python", "-m", "launch.train", "--strategy=ring", "--directory=runs/big")
TRAIN_ON_SERVERS = ("python", "-m", "launch.train", "--strategy=ps", "--directory=runs/big")
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
STEP = "srun --kill-on-bad-exit=1 --cpus-per-task=8 --gpu-bind=none bash -c"

# Stand-ins for Slurm's programs: srun runs the command after its own options, scontrol records its arguments.
STAND_INS = {
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": '#!/bin/bash\necho "$@" >> scontrol.calls\n',
}


def executed(command, folder, job=None):
    """The script, run by bash with stand-ins for Slurm's programs."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, content in STAND_INS.items():
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    return subprocess.run(
        ["bash"],
        input=batch_script(job or Job(), command),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_requested_resource_is_in_the_script():
    script = batch_script(Job(**ALL), TRAIN)
    # Slurm reads no option after the first command.
    assert script.startswith("#!/bin/bash\n" + OPTIONS)
    assert f'\n{STEP} "$task" task \\\n    {" ".join(TRAIN)}\n' in script


def test_nothing_is_requested_by_default():
    script = batch_script(Job(), TRAIN)
    assert f"--signal=TERM@{binary.SECONDS_TO_SAVE}\n" in script
    for absent in ("gpu", "cpus", "time=", "partition"):
        assert absent not in script
    assert "gpu-bind" not in batch_script(Job(gpus_per_node="4"), TRAIN)


def test_workers_of_servers_get_as_many_gpus_each():
    assert " --gpu-bind=per_task:2 bash -c" in batch_script(Job(**ALL), TRAIN_ON_SERVERS)


@pytest.mark.parametrize("job", [Job(), Job(**ALL)])
@pytest.mark.parametrize("directory", ["runs/big", "a folder/it's $HOME"])
def test_bash_can_parse_it(job, directory):
    script = batch_script(job, ["python", "x y.py", "--directory", directory])
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def exits(code, folder):
    return executed(["bash", "-c", f"exit {code}", "command", "--directory=run"], folder)


def requeues(folder) -> int:
    calls = folder / "scontrol.calls"
    return calls.read_text().count("requeue 7\n") if calls.exists() else 0


@pytest.mark.parametrize("code", [0, 1, 2, 4, 75, 137, 143])
def test_only_an_interrupted_job_is_requeued(code, tmp_path):
    """75: all is saved; 143: SIGTERM came while Python started, before there was anything to save."""
    (tmp_path / "run").mkdir()
    done = exits(code, tmp_path)
    assert (done.returncode, done.stderr) == (75 if code == 143 else code, "")
    assert requeues(tmp_path) == (code in (75, 143))
    left = [path.name for path in (tmp_path / "run").iterdir()]
    assert left == (["requeued-7"] if code in (75, 143) else [])
    assert exits(0, tmp_path).returncode == 0
    assert list((tmp_path / "run").iterdir()) == []


def test_all_tasks_get_a_secret_that_is_drawn_for_the_job(tmp_path, monkeypatch):
    monkeypatch.delenv("TOWERS_SECRET", raising=False)
    command = ["bash", "-c", "echo $TOWERS_SECRET", "command", "--directory=run"]
    drawn = [executed(command, tmp_path).stdout for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{32}\n", text) for text in drawn)
    assert drawn[0] != drawn[1]
    monkeypatch.setenv("TOWERS_SECRET", "a user's own")
    assert executed(command, tmp_path).stdout == "a user's own\n"


@pytest.mark.full
def test_requeues_without_a_new_checkpoint_end(tmp_path):
    """As when a job's time limit is too short for its start; a new checkpoint allows five more requeues."""
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for number, step in enumerate((90, 100)):
        (checkpoints / f"step-{step}.index").touch()
        for times in range(1, 6):
            assert exits(75, tmp_path).stderr == ""
            assert requeues(tmp_path) == 5 * number + times
    done = exits(75, tmp_path)
    assert done.returncode == 75
    assert done.stderr == (
        "not requeued: 5 requeues brought no new checkpoint; raise --time and submit the job again\n"
    )
    assert requeues(tmp_path) == 10


def test_the_interrupted_file_of_an_earlier_run_is_ignored(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "interrupted-7").touch()
    assert executed(["true", "--directory=run"], tmp_path).returncode == 0
    assert not (tmp_path / "scontrol.calls").exists()


def test_the_command_is_quoted(tmp_path):
    arguments = ["a b", "it's", "$HOME", '"', "", "\\", "new\nline", "*", "--", "{code}"]
    printing = "import sys; print(sys.argv[1:])"
    done = executed([sys.executable, "-c", printing, *arguments, "--directory=a folder/it's $HOME"], tmp_path)
    assert done.stdout == f"{[*arguments, '''--directory=a folder/it's $HOME''']}\n"


@pytest.mark.parametrize("asked, expected", [(None, "1"), (2, "2")])
def test_the_tasks_of_servers_know_how_many_there_are(asked, expected, tmp_path):
    printing = "import os; print(os.environ.get('TOWERS_SERVERS'))"
    command = [sys.executable, "-c", printing, "--strategy=ps", "--directory=run"]
    done = executed(command, tmp_path, Job(nodes=2, tasks_per_node=2, ps=asked))
    assert (done.stdout, done.stderr) == (f"{expected}\n", "")
    command[3] = "--strategy=ring"
    assert executed(command, tmp_path).stdout == "None\n"


def test_servers_need_tasks():
    with refused("--nodes=1 --tasks_per_node=3: 3 tasks", "2 parameter servers and a worker are 4"):
        batch_script(Job(tasks_per_node=3, ps=2), TRAIN_ON_SERVERS)
    with refused("--ps=2", "--strategy=ring", "omit --ps"):
        batch_script(Job(tasks_per_node=4, ps=2), TRAIN)


@pytest.mark.parametrize("given", [[], ["--directory="], ["--directory"], ["--data_dir=a"], ["directory=a"]])
def test_a_directory_is_needed(given):
    with refused("train", "has no --directory", "add --directory=runs/NAME"):
        batch_script(Job(), ["train", *given])


@pytest.mark.parametrize("value", ["never", "runs/big/checkpoints/step-5"])
def test_a_run_that_would_not_resume_is_refused(value):
    command = ["towers-train", *TRAIN[1:]]
    with refused(f"--resume={value}", "omit --resume"):
        batch_script(Job(), [*command, f"--resume={value}"])
    assert batch_script(Job(), [*command, "--resume=auto"])
    assert batch_script(Job(), ["python", "mine.py", "--directory=a", "--resume", "latest"]), "a flag of its own"


def test_several_tasks_of_a_command_of_one_process_are_refused():
    with refused("2 processes, but --strategy=towers runs in one"):
        batch_script(Job(nodes=2), ["python", "-m", "launch.train", "--directory=runs/big"])


def test_the_files_about_a_job_have_a_folder_before_its_first_task_starts(tmp_path):
    """A task that is preempted while it starts writes such a file: the job is requeued."""
    directory, script = tmp_path / "runs" / "new", tmp_path / "job"
    command = ["sh", "-c", "exit 75", f"--directory={directory}"]
    script.write_text(batch_script(Job(), command))
    for name, text in (("srun", 'shift; exec "$@"'), ("scontrol", f'echo "$@" > {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75, done.stderr
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


@pytest.mark.parametrize("given, found", [("~/a b/run", "home/a b/run"), ("-run", "-run"), ("~", "home")])
def test_the_directory_of_the_command_is_where_the_script_looks(given, found, tmp_path, monkeypatch):
    """launch.train expands ~ after `--directory=`, where no shell does."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    done = executed(["bash", "-c", "exit 75", "command", f"--directory={given}"], tmp_path)
    assert (done.returncode, done.stderr) == (75, "")
    assert (tmp_path / found / "requeued-7").exists()
    assert not (tmp_path / "~").exists()


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
def test_texts_that_slurm_cannot_read_are_refused(name, value):
    with refused(f"--{name}=", "Slurm cannot read it"):
        batch_script(Job(**{name: value}), TRAIN)


def test_numbers_that_the_tasks_or_sbatch_would_refuse():
    with refused("--tasks_per_node=65", "at most 64"):
        batch_script(Job(nodes=2, tasks_per_node=65), TRAIN)
    with refused("--grace_seconds=65536", "at most 65535 seconds"):
        batch_script(Job(grace_seconds=65536), TRAIN)
    assert batch_script(Job(tasks_per_node=64, grace_seconds=65535), TRAIN)


def test_gpus_that_cannot_be_divided_evenly_are_refused():
    with refused("--gpus_per_node=a100:4", "3 tasks", "multiple of --tasks_per_node"):
        batch_script(Job(gpus_per_node="a100:4", tasks_per_node=3), TRAIN)


# Stands in for training on four workers: rank 0 saves for all, long after the others have ended.
PROGRAM = f"""
import os, pathlib, signal, sys, time
rank, folder = os.environ["SLURM_PROCID"], pathlib.Path("run")
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
if (folder / "saved").exists():
    print("resumed", flush=True)
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
    """The id of a job whose four tasks wait in tmp_path."""
    (tmp_path / "run").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    script = batch_script(Job(nodes=2, tasks_per_node=2), [sys.executable, "program.py", "--directory=run"])
    (tmp_path / "job").write_text(script)
    submitted = two_nodes.run("sbatch", "--parsable", "--output=out", "job", cwd=tmp_path)
    assert submitted.code == 0, submitted.err
    wait_until(lambda: len(list((tmp_path / "run").glob("started-*"))) == 4, "four tasks", two_nodes)
    return submitted.out.strip()


def finished(slurm, job_id):
    """What Slurm reports of the job after its end."""
    final_states = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
    wait_until(lambda: slurm.job(job_id)["JobState"] in final_states, "the job's end", slurm)
    return slurm.job(job_id)


@needs_slurm
def test_an_interrupted_job_requeues_itself_and_resumes(running, two_nodes, tmp_path):
    """SIGTERM is what Slurm sends before the time limit. Three tasks end long before the fourth has saved."""
    assert two_nodes.run("scancel", "--signal=TERM", running).code == 0
    job = finished(two_nodes, running)
    out = (tmp_path / "out").read_text()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), out
    assert out.count("resumed\n") == 4
    assert not list((tmp_path / "run").glob("interrupted-*"))


@needs_slurm
def test_a_task_that_fails_ends_the_job(running, two_nodes, tmp_path):
    """The other tasks are stopped and save. The job stays failed and is not requeued."""
    (tmp_path / "run" / "fail").touch()
    job = finished(two_nodes, running)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "1:0", "0")


@needs_slurm
def test_a_cancelled_job_stays_cancelled(running, two_nodes, tmp_path):
    assert two_nodes.run("scancel", running).code == 0
    assert finished(two_nodes, running)["JobState"] == "CANCELLED"
    wait_until(lambda: two_nodes.run("squeue", "--noheader").out == "", "an empty queue", two_nodes)
    assert two_nodes.job(running)["Restarts"] == "0"
    assert two_nodes.job(running)["JobState"] == "CANCELLED"
