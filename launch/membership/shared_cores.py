"""How many processes share this machine's cores."""

import os
from collections.abc import Mapping

from strategies.cluster import Cluster
from towers.errors import UserError
from towers.hardware.control_groups import core_quota
from towers.hardware.cores import may_use_all_cores, usable_cpus
from towers.hardware.cpu_topology import physical_cores

# Set by launch.local.
VARIABLE = "TOWERS_PROCESSES_HERE"
# Number of CPUs that Slurm gave to the step on this machine.
_OF_STEP = "SLURM_CPUS_ON_NODE"


def processes_here(cluster: Cluster | None, environ: Mapping[str, str] = os.environ) -> int:
    """Number of processes that compute on this machine's cores, this one included.

    The launcher's variable gives the number. Without it, this counts the cluster's members on this process's host,
    unless this process may use only some of the machine's cores: the others may have the rest. Tasks that Slurm
    does not bind share those of their step.

    Args:
      cluster: the cluster whose members may share the cores; None for a process that trains alone.
      environ: the environment.

    Raises:
      UserError: the launcher's variable is not a whole number of at least 1.
    """
    if VARIABLE in environ:
        return _number(environ[VARIABLE])
    if cluster is None:
        return 1
    count = sum(member.host == cluster.this.host for member in cluster.computing)
    is_shared = may_use_all_cores() or _limits_all_here(cluster) or _has_cores_of_step(count, environ)
    return max(1, count) if is_shared else 1


def _limits_all_here(cluster: Cluster) -> bool:
    """Whether the limit on this process's cores applies to the other members on this host too.

    Members that connect by a loopback address are in one container and share its limit of CPU time. A CPU affinity
    that the parent process has too was not set for this process alone.
    """
    if not cluster.this.is_loopback:
        return False
    return core_quota() is not None or set(usable_cpus()) == set(usable_cpus(os.getppid()))


def _has_cores_of_step(count: int, environ: Mapping[str, str]) -> bool:
    """Whether Slurm did not bind its `count` tasks on this machine: each may use all cores of the step.

    On some machines Slurm counts cores, not hyperthreads. There each of two bound tasks may have as many
    hyperthreads as Slurm counts cores for both; so the cores of all tasks are compared too.
    """
    of_step, cpus = environ.get(_OF_STEP, ""), usable_cpus()
    return of_step.isdecimal() and len(cpus) >= int(of_step) and count * physical_cores(cpus) > int(of_step)


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise UserError(
            f"{VARIABLE}={text!r}: it is the number of processes on this machine, from 1; unset it, since "
            "launch.local sets it for the processes that it starts"
        )
    return int(text)
