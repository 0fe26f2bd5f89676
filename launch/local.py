"""Starts a cluster on this machine: one command, as many processes, each with its own TF_CONFIG.

    python -m launch.local --workers=2 -- python -m launch.train --strategy=ring
        trains on two processes, and prints what each of them says behind its name, as
        [worker:0] step 395: evaluation loss 0.0412, accuracy 0.9880

    python -m launch.local --max_restarts=1 --kill=worker:1@step20 -- python -m launch.train --strategy=ring
        kills a process in the middle, starts the cluster again from its newest checkpoint, and prints last
        recovered: worker:1 was killed at step 20, restart 1 completed

Ctrl-C and SIGTERM are passed on (to those who serve others when these have ended), and whatever happens no process
is left behind. Each one's lines also lie in the run's directory, as logs/worker-1.log. When one fails the others
are ended, and the last block on stderr begins with the one that is to blame and its last lines. A command that is
a shell script should `exec` its last line: a process is taken to have ended when its first program has.

Where Linux allows it the cluster has a network of its own, with nothing in it but the loopback: nobody else can
reach its ports, nor can its processes download anything. --noprivate_network gives them this machine's network.

The processes find in their environment, beside TF_CONFIG:

TOWERS_RUN_DIRECTORY   where everything is kept if they are given no --directory of their own
TOWERS_PROCESSES_HERE  how many of them compute, and so share this machine's cores
TOWERS_FAULT           'kill@20' or 'stop@20': the fault that --kill or --stop plans for this process

Exit codes: launch/binary.py; of a failed cluster it is that of the process to blame, 128 + n for signal n.
"""

import datetime
import os
import pathlib
import shutil
import sys

from absl import flags

from launch import binary
from launch.flags.checks import at_least_zero, positive
from launch.flags.command_line import flag_value
from launch.membership.roles import Roles
from launch.supervision.cluster_run import LocalRun, Plan
from launch.supervision.own_program import own_program
from launch.supervision.planned_faults import planned_faults
from launch.supervision.private_network import enter_private_network
from launch.supervision.screen import tell
from towers.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 2, "Workers.")
flags.DEFINE_integer("ps", 0, "Parameter servers.")
flags.DEFINE_bool("chief", False, "A chief, beside the workers.")
flags.DEFINE_bool("evaluator", False, "An evaluator, beside the cluster.")
flags.DEFINE_float("grace_seconds", 30.0, "How long a process may take to end before it is killed.")
flags.DEFINE_integer(
    "max_restarts",
    0,
    "How often a failure is mended: a worker of servers is replaced, else all start again.",
)
flags.DEFINE_multi_string("kill", [], "worker:1@step20: this process dies before this step, to see a recovery.")
flags.DEFINE_multi_string("stop", [], "worker:1@step20: this process stands still from this step on.")
flags.DEFINE_bool("private_network", True, "A network of the cluster's own, where the system allows it.")
positive("workers")
at_least_zero("ps", "grace_seconds", "max_restarts")


def main(arguments: list[str]) -> int:
    plan = plan_from_flags(arguments[1:])
    if FLAGS.private_network:
        leave_the_network()
    return LocalRun(plan).run()


def leave_the_network() -> None:
    """For a network of its own; where that is refused, says so."""
    try:
        enter_private_network()
    except OSError as error:
        tell(
            f"warning: a network of its own is refused ({error.strerror or error}), so others may reach the "
            "cluster's ports, which ask for no password; --noprivate_network says no more of it",
            is_error=True,
        )


def plan_from_flags(command: list[str]) -> Plan:
    """What the flags and the command ask for.

    Raises:
      UserError: no command, one that can't be found, or a fault that means nothing.
    """
    roles = Roles(workers=FLAGS.workers, ps=FLAGS.ps, chief=FLAGS.chief, evaluator=FLAGS.evaluator)
    runnable, variables = runnable_command(command)
    return Plan(
        command=runnable,
        variables=variables,
        roles=roles,
        directory=run_directory(command),
        faults=planned_faults(FLAGS.kill, FLAGS.stop, roles=roles, max_restarts=FLAGS.max_restarts),
        max_restarts=FLAGS.max_restarts,
        grace_seconds=FLAGS.grace_seconds,
    )


def runnable_command(command: list[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command to execute, and the variables to add to its environment.

    `python` becomes the Python interpreter that runs this launcher. `python -m launch.NAME` ignores the current
    folder, where a user's models.py would shadow this project's; any other program runs as typed.

    Raises:
      UserError: there is no command, or no such program.
    """
    if not command:
        raise UserError("no command: give one behind --, as: --workers=2 -- python -m launch.train")
    if command[:2] == ["python", "-m"] and command[2:3] and command[2].startswith("launch."):
        return own_program(*command[2:])
    program = sys.executable if command[0] == "python" else command[0]
    if shutil.which(program) is None:
        raise UserError(f"command {program!r}: no such program here; give its path, or `python`")
    return (program, *command[1:]), {}


def run_directory(command: list[str]) -> pathlib.Path:
    """The command's own --directory, or a new one named for the time; absolute."""
    found = flag_value(command, "directory")
    if not found:
        started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        found = os.path.join("runs", f"{started}-{os.getpid()}")
    return pathlib.Path(found).absolute()


def cli() -> None:
    """Console script."""
    binary.run(main, takes_command=True)


if __name__ == "__main__":
    cli()
