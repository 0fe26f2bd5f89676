r"""Writes a batch script for Slurm that trains on several nodes and outlives its time limit.

    python -m launch.slurm script --nodes=4 --tasks_per_node=2 --time=8:00:00 --output=train.sbatch -- \
        python -m launch.train --strategy=ring --directory=runs/big
            train.sbatch: submit it with sbatch train.sbatch

    python -m launch.slurm script --nodes=4 -- python -m launch.train ... | sbatch
        the same without a file

Slurm sends SIGTERM --grace_seconds before the time is up; training saves and ends with exit code 75; the job puts
itself back into the queue and goes on from there. A job that ends otherwise, or is cancelled, is not put back.
Exit codes: launch/binary.py.
"""

import dataclasses
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from launch import binary
from launch.flags.checks import positive
from launch.flags.command_line import flag_value
from towers.errors import UserError

FLAGS = flags.FLAGS
_ACTION = "script"
_USAGE = "python -m launch.slurm script --nodes=2 -- python -m launch.train --directory=runs/big"
_GPUS = re.compile(r"(?:[\w.-]+:)?0*([1-9][0-9]*)", re.ASCII)
_TIME = re.compile(r"(?:[0-9]+-)?[0-9]+(?::[0-9]{1,2}){0,2}")
_PLAIN = re.compile(r"[\w.,:@/+-]+", re.ASCII)

# srun --kill-on-bad-exit stops the other tasks when one has failed, and soon kills them. Exit code 75 is no
# failure, and the others may still be saving: so it becomes 0 and a note in the run's directory. srun itself gives
# the highest code of all, which would also be 75 where one failed and the others were stopped: put back, that job
# would fail again, for ever.
# SIGTERM reaches the shell around a task together with the task; it has to see the task's end all the same.
_SCRIPT = """\
#!/bin/bash
{options}

interrupted={directory}/interrupted-$SLURM_JOB_ID
rm -f "$interrupted"
export interrupted

# One task: exit code {code} says that a signal stopped it and all is saved, which is no failure.
task='trap : TERM; "$@"; code=$?; [ $code -eq {code} ] || exit $code; touch "$interrupted"'

srun --kill-on-bad-exit=1{step_options} bash -c "$task" task \\
    {command}
code=$?

# The same job goes on where it stopped. (scancel ends this shell before it comes here.)
if [ $code -eq 0 ] && [ -e "$interrupted" ]; then
    rm -f "$interrupted"
    code={code}
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked of Slurm.

    Attributes:
      nodes, tasks_per_node: a task is a worker.
      cpus_per_task: cores of a worker; None for Slurm's default, which is one.
      gpus_per_node: a number, or a type and a number as 'a100:4', dealt evenly to the node's tasks.
      time: the limit in Slurm's form, '90' (minutes), '8:00:00' or '2-12:00:00'; None for the partition's.
      partition: None for Slurm's default.
      job_name: what queues show.
      grace_seconds: how long before the limit training is told to save.
    """

    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: str | None = None
    time: str | None = None
    partition: str | None = None
    job_name: str = "towers"
    grace_seconds: int = 60


def batch_script(job: Job, command: Sequence[str]) -> str:
    """The text that sbatch takes, with `command` as every task of one srun.

    Raises:
      UserError: the command can't go on after a stop, or Slurm could not read an option.
    """
    if not command:
        raise UserError(f"there is no command: it stands after --, as in {_USAGE}")
    directory = _directory(command)
    _check_plain(job)
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in _job_options(job)),
        step_options="".join(f" {option}" for option in _step_options(job)),
        directory=shlex.quote(directory),
        command=shlex.join(command),
        code=binary.INTERRUPTED,
    )


def _job_options(job: Job) -> list[str]:
    """sbatch's options."""
    asked = {
        "job-name": job.job_name,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-node": job.gpus_per_node,
        "time": job.time,
        "partition": job.partition,
        # To the tasks, not to the script.
        "signal": f"TERM@{job.grace_seconds}",
        # What was printed before the job was put back stays.
        "open-mode": "append",
    }
    return [*(f"--{name}={value}" for name, value in asked.items() if value is not None), "--requeue"]


def _step_options(job: Job) -> list[str]:
    """srun's own options: what it does not take over from sbatch.

    Raises:
      UserError: the GPUs can't be dealt evenly.
    """
    options = []
    if job.cpus_per_task is not None:
        options.append(f"--cpus-per-task={job.cpus_per_task}")
    if job.gpus_per_node is not None and job.tasks_per_node > 1:
        num_gpus = int(_GPUS.fullmatch(job.gpus_per_node)[1])
        if num_gpus % job.tasks_per_node:
            raise UserError(
                f"--gpus_per_node={job.gpus_per_node}: {job.tasks_per_node} tasks can't have the same number of "
                "them; make it a multiple of --tasks_per_node"
            )
        # Otherwise every task would take all of its node's.
        options.append(f"--gpu-bind=per_task:{num_gpus // job.tasks_per_node}")
    return options


def _directory(command: Sequence[str]) -> str:
    """The run's directory, which a job that was put back must find again.

    Raises:
      UserError: there is none, or the command would not go on from it.
    """
    directory = flag_value(command, "directory")
    if not directory:
        raise UserError(
            f"{shlex.join(command)}: no --directory: a job that was put back must find what it saved; add "
            "--directory=runs/NAME"
        )
    resume = flag_value(command, "resume")
    if resume not in (None, "auto"):
        raise UserError(
            f"--resume={resume}: a job that was put back would begin from there again each time; leave it out"
        )
    return directory


def _check_plain(job: Job) -> None:
    """Raises UserError if Slurm could not read one of the texts."""
    rules = {
        "gpus_per_node": (_GPUS, "a number above 0, or a type and a number, as 4 or a100:4"),
        "time": (_TIME, "90 (minutes), 8:00:00 or 2-12:00:00"),
        "partition": (_PLAIN, "it of letters, digits and .,:@/+-_"),
        "job_name": (_PLAIN, "it of letters, digits and .,:@/+-_"),
    }
    for name, (pattern, form) in rules.items():
        value = getattr(job, name)
        if value is not None and not pattern.fullmatch(value):
            raise UserError(f"--{name}={value!r}: Slurm could not read it; write {form}")


def _define_flags() -> None:
    flags.DEFINE_integer("nodes", 1, "Nodes.")
    flags.DEFINE_integer("tasks_per_node", 1, "Workers of each node.")
    flags.DEFINE_integer("cpus_per_task", None, "Cores of each worker; default: Slurm's, which is one.")
    flags.DEFINE_string("gpus_per_node", None, "GPUs of each node, as 4 or a100:4, dealt evenly to its workers.")
    flags.DEFINE_string("time", None, "Limit: minutes, H:M:S or D-H:M:S; default: the partition's.")
    flags.DEFINE_string("partition", None, "Where to queue; default: Slurm's.")
    flags.DEFINE_string("job_name", "towers", "What queues show.")
    flags.DEFINE_integer("grace_seconds", 60, "Time to save in, before the limit.")
    flags.DEFINE_string("output", None, "The file to write; default: standard output.")
    positive("nodes", "tasks_per_node", "cpus_per_task", "grace_seconds")


def main(action: str, command: Sequence[str]) -> None:
    """Writes what the flags say."""
    if action != _ACTION:
        asked = f"{action!r} is unknown" if action else "nothing is asked for"
        raise UserError(f"{asked}: the one thing to do is 'script', as in {_USAGE}")
    asked = {field.name: FLAGS[field.name].value for field in dataclasses.fields(Job)}
    script = batch_script(Job(**asked), command)
    if FLAGS.output is None:
        sys.stdout.write(script)
        return
    _write(pathlib.Path(FLAGS.output), script)
    print(f"{FLAGS.output}: submit it with sbatch {shlex.quote(FLAGS.output)}")


def _write(path: pathlib.Path, script: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(script)
    except FileExistsError:
        raise UserError(f"--output={path}: it exists, nothing is overwritten; remove it or name another") from None
    except OSError as error:
        raise UserError(f"--output={path}: {error.strerror}: give a file that can be written") from error


def cli() -> None:
    """Runs the binary: an action and flags before --, a command behind it."""
    _define_flags()
    action = sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
    binary.run(lambda arguments: main(action, arguments[1:]), takes_command=True)


if __name__ == "__main__":
    cli()
