r"""Writes a Slurm batch script that trains on several nodes and continues after its time limit.

    python -m launch.slurm script --nodes=4 --tasks_per_node=2 --time=8:00:00 --output=train.sbatch -- \
        python -m launch.train --strategy=ring --directory=runs/big
            train.sbatch: submit it with sbatch train.sbatch

    python -m launch.slurm script --nodes=4 -- python -m launch.train --strategy=ring --directory=runs/big | sbatch
        submits the script without a file

    python -m launch.slurm script --nodes=2 --tasks_per_node=3 --ps=2 -- \
        python -m launch.train --strategy=ps --directory=runs/servers
        starts a chief, two parameter servers and three workers: the servers are the last tasks of the nodes

Slurm sends SIGTERM --grace_seconds before the time limit. Training then saves a checkpoint and exits with code 75;
the job requeues itself and resumes from the checkpoint. A job that fails or is cancelled is not requeued, nor one
that was requeued five times without a new checkpoint.
Exit codes: launch/binary.py.
"""

import dataclasses
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from launch import binary
from launch.flags.checks import positive
from launch.flags.paths import define_path
from launch.manifests.cluster_of_command import HELP
from launch.manifests.slurm_script import Job, batch_script
from towers.errors import UserError

FLAGS = flags.FLAGS
_ACTION = "script"
_USAGE = "python -m launch.slurm script --nodes=2 -- python -m launch.train --strategy=ring --directory=runs/big"


def _define_flags() -> None:
    flags.DEFINE_integer("nodes", 1, "Number of nodes.")
    flags.DEFINE_integer("tasks_per_node", 1, "Processes per node; each is one Slurm task.")
    flags.DEFINE_integer("ps", None, f"{HELP} They and a chief are taken from the tasks; the others are workers.")
    flags.DEFINE_integer("cpus_per_task", None, "CPU cores per task. Default: Slurm's default, usually 1.")
    flags.DEFINE_string(
        "gpus_per_node",
        None,
        "GPUs per node, as 4 or a100:4, divided evenly among the node's tasks: a multiple of --tasks_per_node. "
        "Default: none are requested.",
    )
    flags.DEFINE_string(
        "time", None, "Time limit: minutes, H:M:S or D-H:M:S. Default: the limit of the partition."
    )
    flags.DEFINE_string("partition", None, "Partition to submit to. Default: Slurm's default partition.")
    flags.DEFINE_string("job_name", "towers", "Job name that squeue shows.")
    flags.DEFINE_integer(
        "grace_seconds",
        binary.SECONDS_TO_SAVE,
        "Seconds before the time limit at which Slurm sends SIGTERM. Raise it where saving takes longer.",
    )
    define_path("output", None, "File to write; it must not exist. Default: standard output.")
    positive("nodes", "tasks_per_node", "cpus_per_task", "grace_seconds")


def main(action: str, command: Sequence[str]) -> None:
    """Writes the script that the flags describe."""
    if action != _ACTION:
        problem = f"unknown action {action!r}" if action else "no action given"
        raise UserError(f"{problem}: the only action is 'script', as in {_USAGE}")
    if not command:
        raise UserError(f"no command given: put it after --, as in {_USAGE}")
    settings = {field.name: FLAGS[field.name].value for field in dataclasses.fields(Job)}
    # Bytes, so that the command's words stay as typed in any locale, even a file name that is not valid text.
    script = os.fsencode(batch_script(Job(**settings), command))
    if FLAGS.output is None:
        sys.stdout.buffer.write(script)
        return
    _write(pathlib.Path(FLAGS.output), script)
    print(f"{FLAGS.output}: submit it with sbatch {shlex.quote(FLAGS.output)}")


def _write(path: pathlib.Path, script: bytes) -> None:
    try:
        with path.open("xb") as file:
            file.write(script)
    except FileExistsError:
        raise UserError(
            f"--output={path}: this file exists and is not overwritten; remove it or give another name"
        ) from None
    except OSError as error:
        raise UserError(f"--output={path}: cannot write the file ({error.strerror}); give another path") from error


def cli() -> None:
    """Console script: an action and flags, then -- and the command that each task runs."""
    _define_flags()
    action = sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
    binary.run(lambda arguments: main(action, arguments[1:]), takes_command=True, usage=_USAGE, trains=False)


if __name__ == "__main__":
    cli()
