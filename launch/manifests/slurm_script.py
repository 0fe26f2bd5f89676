"""The text of a Slurm batch script that trains, requeues itself when interrupted, and resumes."""

import dataclasses
import re
import shlex
from collections.abc import Sequence

from launch import binary
from launch.flags.flag_in_command import check_resumes, flag_value
from launch.manifests.cluster_of_command import check_cluster, num_servers
from launch.membership.slurm_step import SERVERS_VARIABLE, TASKS_OF_A_NODE
from towers.errors import UserError

_GPUS = re.compile(r"(?:[\w.-]+:)?0*([1-9][0-9]*)", re.ASCII)
_TIME = re.compile(r"(?:[0-9]+-)?[0-9]+(?::[0-9]{1,2}){0,2}")
_HOME = re.compile(r"~[\w.-]*", re.ASCII)
_PLAIN = re.compile(r"[\w.,:@/+-]+", re.ASCII)
# Slurm's own limit for --signal.
_MOST_GRACE_SECONDS = 65535

# srun --kill-on-bad-exit stops the other tasks when one has failed, and kills them soon after. Exit code 75
# (interrupted, all is saved) is no failure, and other tasks may still be saving: so each task turns 75 into 0
# and leaves a file in the run's directory. The exit code of srun itself is not enough: it is the highest of all
# tasks, so it is 75 also if one task failed and the others were stopped. Such a job would be requeued and fail
# again. SIGTERM also reaches the shell around a task: `trap : TERM` keeps the shell alive until its task has
# ended. A task that gets SIGTERM while Python starts ends with 143: it had nothing to save. If it gets the
# signal because another task has failed, srun's exit code is that of the other task.
_KILLED_BY_SIGTERM = 143
_MAX_REQUEUES_WITHOUT_PROGRESS = 5
_SCRIPT = """\
#!/bin/bash
{options}

interrupted={directory}/interrupted-$SLURM_JOB_ID
requeued={directory}/requeued-$SLURM_JOB_ID
# A task that is stopped while it starts has not made the directory yet.
mkdir -p {directory}
rm -f "$interrupted"
export interrupted

# Parameter servers let in only processes with this job's secret. srun gives it to all tasks.
export TOWERS_SECRET="${{TOWERS_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}"
{variables}
# One task. Exit code {code} means: stopped by a signal, everything is saved; {killed}: stopped before it had
# anything to save. Both are no failures.
task='trap : TERM; "$@"; code=$?; case $code in {code}|{killed}) touch "$interrupted";; *) exit $code;; esac'

srun --kill-on-bad-exit=1{step_options} bash -c "$task" task \\
    {command}
code=$?

# Requeue an interrupted job: it resumes from its checkpoint. (scancel ends this shell before it gets here.)
# The file $requeued holds the newest checkpoint, and how many requeues there were since it was written.
if [ $code -eq 0 ] && [ -e "$interrupted" ]; then
    rm -f "$interrupted"
    code={code}
    newest=$(ls {directory}/checkpoints 2> /dev/null | grep 'index$' | sort -V | tail -n 1)
    times=1
    if [ -e "$requeued" ] && [ "$(head -n 1 "$requeued")" = "$newest" ]; then
        times=$(($(tail -n 1 "$requeued") + 1))
    fi
    if [ $times -le {most} ]; then
        (echo "$newest"; echo $times) > "$requeued"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "not requeued: {most} requeues brought no new checkpoint; raise --time and submit the job again" >&2
        rm -f "$requeued"
    fi
else
    rm -f "$requeued"
fi
exit $code
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The resources to request from Slurm.

    Attributes:
      nodes: number of nodes.
      tasks_per_node: processes per node; each is one task.
      ps: how many of the tasks are parameter servers; with any, rank 0 is the chief. The others are workers. None:
        what the command needs.
      cpus_per_task: CPU cores per task; None for Slurm's default, which is 1.
      gpus_per_node: a number, or a type and a number as 'a100:4', divided evenly among the node's tasks.
      time: time limit in Slurm's form, '90' (minutes), '8:00:00' or '2-12:00:00'; None for the partition's limit.
      partition: the partition; None for Slurm's default one.
      job_name: name that squeue shows.
      grace_seconds: seconds before the time limit at which Slurm sends SIGTERM.
    """

    nodes: int = 1
    tasks_per_node: int = 1
    ps: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: str | None = None
    time: str | None = None
    partition: str | None = None
    job_name: str = "towers"
    grace_seconds: int = binary.SECONDS_TO_SAVE


def batch_script(job: Job, command: Sequence[str]) -> str:
    """The script to submit with sbatch; every task of its one srun runs `command`.

    Raises:
      UserError: the command could not resume after an interruption, there are too few tasks for its servers or too
        many on a node, or Slurm could not read an option.
    """
    _check_numbers(job)
    directory = _directory(command)
    servers = _servers(job, command)
    _check_texts(job)
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in _job_options(job)),
        step_options="".join(f" {option}" for option in _step_options(job, servers)),
        directory=_word(directory),
        variables=f"export {SERVERS_VARIABLE}={servers}\n" if servers else "",
        command=shlex.join(command),
        code=binary.INTERRUPTED,
        killed=_KILLED_BY_SIGTERM,
        most=_MAX_REQUEUES_WITHOUT_PROGRESS,
    )


def _job_options(job: Job) -> list[str]:
    """sbatch's options."""
    requested = {
        "job-name": job.job_name,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-node": job.gpus_per_node,
        "time": job.time,
        "partition": job.partition,
        # Without "B:", Slurm signals the tasks and not the script.
        "signal": f"TERM@{job.grace_seconds}",
        # Keeps the output from before a requeue.
        "open-mode": "append",
    }
    return [*(f"--{name}={value}" for name, value in requested.items() if value is not None), "--requeue"]


def _step_options(job: Job, servers: int) -> list[str]:
    """srun's own options, which it does not inherit from sbatch.

    The tasks of a ring see all GPUs of their node and divide them (`launch.membership.shared_gpus`): where Slurm
    hides a task's GPUs from the others, NCCL can't copy between them directly, over NVLink, but goes through the
    host's memory. Servers use no GPU, so with them Slurm divides: all workers get the same number.

    Raises:
      UserError: the GPUs of a node cannot be divided evenly among its tasks.
    """
    options = []
    if job.cpus_per_task is not None:
        options.append(f"--cpus-per-task={job.cpus_per_task}")
    if job.gpus_per_node is not None and job.tasks_per_node > 1:
        num_gpus = int(_GPUS.fullmatch(job.gpus_per_node)[1])
        if num_gpus % job.tasks_per_node:
            raise UserError(
                f"--gpus_per_node={job.gpus_per_node}: {num_gpus} GPUs cannot be divided evenly among "
                f"{job.tasks_per_node} tasks; give a multiple of --tasks_per_node"
            )
        options.append(f"--gpu-bind={f'per_task:{num_gpus // job.tasks_per_node}' if servers else 'none'}")
    return options


def _servers(job: Job, command: Sequence[str]) -> int:
    """Number of parameter servers among the tasks.

    Raises:
      UserError: too few tasks for servers, a chief and a worker; or several tasks for a command of one process.
    """
    servers, tasks = num_servers(command, job.ps), job.nodes * job.tasks_per_node
    check_cluster(command, tasks, f"--nodes={job.nodes} --tasks_per_node={job.tasks_per_node}")
    if servers and tasks < servers + 2:
        raise UserError(
            f"--nodes={job.nodes} --tasks_per_node={job.tasks_per_node}: {tasks} tasks, but a chief, {servers} "
            f"parameter servers and a worker are {servers + 2}; raise --tasks_per_node"
        )
    return servers


def _directory(command: Sequence[str]) -> str:
    """The run's directory, from which a requeued job resumes.

    Raises:
      UserError: the command names no directory, or would not resume from it.
    """
    directory = flag_value(command, "directory")
    if not directory:
        raise UserError(
            f"{shlex.join(command)}: the command has no --directory, where a requeued job finds its "
            "checkpoint; add --directory=runs/NAME"
        )
    check_resumes(command, "a requeued job")
    return directory


def _word(path: str) -> str:
    """The path as a word of the script, in which the shell expands ~ as the command's own flag does."""
    home, slash, rest = path.partition("/")
    if _HOME.fullmatch(home):
        return home + slash + (shlex.quote(rest) if rest else "")
    # A path that begins with a dash would be an option of mkdir.
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def _check_numbers(job: Job) -> None:
    """Raises UserError if the tasks of the job, or sbatch, would refuse a number."""
    if job.tasks_per_node > TASKS_OF_A_NODE:
        raise UserError(
            f"--tasks_per_node={job.tasks_per_node}: a job has {TASKS_OF_A_NODE} ports on a node; give at most "
            f"{TASKS_OF_A_NODE}, each with several towers"
        )
    if job.grace_seconds > _MOST_GRACE_SECONDS:
        raise UserError(
            f"--grace_seconds={job.grace_seconds}: Slurm sends a signal at most {_MOST_GRACE_SECONDS} seconds "
            "before the time limit; give fewer"
        )


def _check_texts(job: Job) -> None:
    """Raises UserError if Slurm could not read one of the texts."""
    name_form = "letters, digits and .,:@/+-_ only"
    rules = {
        "gpus_per_node": (_GPUS, "a number above 0, or a type and a number, as 4 or a100:4"),
        "time": (_TIME, "90 (minutes), 8:00:00 or 2-12:00:00"),
        "partition": (_PLAIN, name_form),
        "job_name": (_PLAIN, name_form),
    }
    for name, (pattern, form) in rules.items():
        value = getattr(job, name)
        if value is not None and not pattern.fullmatch(value):
            raise UserError(f"--{name}={value!r}: Slurm cannot read it; write {form}")
