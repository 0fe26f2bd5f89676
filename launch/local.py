"""Starts a cluster on this machine: runs one command in several processes, each with its own TF_CONFIG.

    python -m launch.local --workers=2 -- python -m launch.train --strategy=ring
        trains on two processes, and prints each line of their output after the name of its process, as
        [worker:0] step 395: evaluation loss 0.0412, accuracy 0.9880

    python -m launch.local --max_restarts=1 --kill=worker:1@step20 -- python -m launch.train --strategy=ring
        kills a process during training, restarts the cluster from its newest checkpoint, and prints last
        recovered: worker:1 was killed at step 20, restart 1 completed

Signals: the launcher forwards Ctrl-C, SIGTERM and SIGHUP (a closed terminal) to the processes. Those that serve
others, such as parameter servers, get SIGTERM when the others have ended. If the signal kills a process that is
still starting, that is no failure: it had nothing to save. No process is left running, whatever happens.

Logs: the lines of each process are also saved in the run's directory, as logs/worker-1.log.

Failures: when a process fails, the launcher ends the others. The last block on stderr begins with the process that
caused the failure and its last lines. A process counts as ended when the program of the command has ended; a
command that is a shell script should therefore `exec` its last line.

Restarts: the first one is immediate. A process that fails again within two minutes is restarted after 2, 4, 8, 16,
then 30 seconds, as the line of the restart says. A signal during a pause ends the launcher with exit code 75.

Private network: where Linux allows it, the cluster runs in a network that has only a loopback interface. Nothing
outside the cluster can reach its ports, and its processes can't download. --noprivate_network disables it.

NUMA nodes: on a machine with several nodes of equal size, each process that computes runs on the cores of one
node, or of an equal part of the nodes, if nodes and processes divide evenly and no container limits CPU time.

The environment of each process holds TF_CONFIG and

TOWERS_RUN_DIRECTORY   the run's directory, for processes without a --directory of their own
TOWERS_PROCESSES_HERE  number of processes that compute on the same cores as this one, itself included
TOWERS_SHARED_GPUS     the CUDA_VISIBLE_DEVICES of all processes; those that compute divide these GPUs
TOWERS_FAULT           'kill@20' or 'stop@20': the fault that --kill or --stop plans for this process

Exit codes: see launch/binary.py. If the cluster fails, the exit code is that of the process that caused the
failure, or 128 + n if signal n killed that process.
"""

import datetime
import os
import pathlib
import shutil
import sys

from absl import flags

from launch import binary
from launch.flags.checks import at_least_zero, positive
from launch.flags.flag_in_command import check_resumes, flag_value
from launch.membership.roles import Roles
from launch.networks.private_network import enter_private_network
from launch.supervision.cluster_run import LocalRun, Plan
from launch.supervision.own_program import own_program
from launch.supervision.planned_faults import planned_faults
from launch.supervision.screen import print_line
from towers.errors import UserError

FLAGS = flags.FLAGS
# In this time processes notice that another one is lost.
_SECONDS_TO_NOTICE = 30.0
flags.DEFINE_integer("workers", 2, "Number of workers.")
flags.DEFINE_integer("ps", 0, "Number of parameter servers.")
flags.DEFINE_bool("chief", False, "Start a chief in addition to the workers.")
flags.DEFINE_bool("evaluator", False, "Start an evaluator in addition to the cluster.")
flags.DEFINE_float(
    "grace_seconds",
    None,
    "Seconds to wait for processes to end: after another process failed, before SIGTERM (default: "
    f"{_SECONDS_TO_NOTICE:g}), and after a signal, before SIGKILL (default: {binary.SECONDS_TO_SAVE}).",
)
flags.DEFINE_integer(
    "max_restarts",
    0,
    "Maximum restarts. A failed parameter-server worker or evaluator is replaced; otherwise the whole cluster "
    "restarts.",
)
flags.DEFINE_multi_string(
    "kill", [], "Kill a process before a step, to test recovery from a lost worker; for example worker:1@step20."
)
flags.DEFINE_multi_string(
    "stop", [], "Stop a process before a step, to test recovery from a hang; for example worker:1@step20."
)
flags.DEFINE_bool(
    "private_network",
    True,
    "Run the cluster in a private network, where the system allows it. Disable it for programs that download.",
)
positive("workers")
at_least_zero("ps", "grace_seconds", "max_restarts")


def main(arguments: list[str]) -> int:
    plan = plan_from_flags(arguments[1:])
    if FLAGS.private_network:
        try_private_network()
    return LocalRun(plan).run()


def try_private_network() -> None:
    """Enters a private network; prints a warning if the system does not permit one."""
    try:
        enter_private_network()
    except OSError as error:
        print_line(
            f"warning: could not create a private network ({error.strerror or error}), so others may be able to "
            "connect to the cluster's ports, which need no password; --noprivate_network silences this warning",
            is_error=True,
        )


def plan_from_flags(command: list[str]) -> Plan:
    """The cluster that the flags and the command describe.

    Raises:
      UserError: the command is missing or not found, or would not resume, or a planned fault is invalid.
    """
    if FLAGS.max_restarts:
        check_resumes(command, "a restart")
    roles = Roles(workers=FLAGS.workers, ps=FLAGS.ps, chief=FLAGS.chief, evaluator=FLAGS.evaluator)
    runnable, variables = runnable_command(command)
    return Plan(
        command=runnable,
        variables=variables,
        roles=roles,
        directory=run_directory(command),
        faults=planned_faults(FLAGS.kill, FLAGS.stop, roles=roles, max_restarts=FLAGS.max_restarts),
        max_restarts=FLAGS.max_restarts,
        seconds_to_notice=_SECONDS_TO_NOTICE if FLAGS.grace_seconds is None else FLAGS.grace_seconds,
        seconds_to_save=binary.SECONDS_TO_SAVE if FLAGS.grace_seconds is None else FLAGS.grace_seconds,
    )


def runnable_command(command: list[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command to execute, and the variables to add to its environment.

    `python` becomes the Python interpreter that runs this launcher. `python -m launch.NAME` ignores the current
    folder, where a user's models.py would shadow this project's; any other program runs as typed.

    Raises:
      UserError: the command is missing, or its program is not found.
    """
    if not command:
        example = "--workers=2 -- python -m launch.train --strategy=ring"
        raise UserError(f"no command: give one after --, for example {example}")
    if command[:2] == ["python", "-m"] and command[2:3] and command[2].startswith("launch."):
        return own_program(*command[2:])
    program = sys.executable if command[0] == "python" else command[0]
    if shutil.which(program) is None:
        raise UserError(f"command {program!r}: program not found; give its path, or `python`")
    return (program, *command[1:]), {}


def run_directory(command: list[str]) -> pathlib.Path:
    """The command's own --directory, or a new one named for the time; absolute."""
    found = flag_value(command, "directory")
    if not found:
        started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        found = os.path.join("runs", f"{started}-{os.getpid()}")
    # Expanded like the value of the command's own flag.
    return pathlib.Path(os.path.expanduser(found)).absolute()


def cli() -> None:
    """Console script."""
    binary.run(main, takes_command=True)


if __name__ == "__main__":
    cli()
