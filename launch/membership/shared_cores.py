"""How many processes share this machine's cores."""

import os
from collections.abc import Mapping

from strategies.cluster import Cluster
from towers.errors import UserError
from towers.hardware.control_groups import core_quota
from towers.hardware.cores import may_use_all_cores, usable_cpus

# Set by launch.local.
VARIABLE = "TOWERS_PROCESSES_HERE"


def processes_here(cluster: Cluster | None, environ: Mapping[str, str] = os.environ) -> int:
    """Number of processes that compute on this machine's cores, this one included.

    The launcher's variable gives the number. Without it, this counts the cluster's members on this process's host,
    unless this process may use only some of the machine's cores: the others may have the rest.

    Args:
      cluster: the cluster whose members may share the cores; None for a process that trains alone.
      environ: the environment.

    Raises:
      UserError: the launcher's variable is not a whole number of at least 1.
    """
    if VARIABLE in environ:
        return _number(environ[VARIABLE])
    if cluster is None or not (may_use_all_cores() or _limits_all_here(cluster)):
        return 1
    return max(1, sum(member.host == cluster.this.host for member in cluster.computing))


def _limits_all_here(cluster: Cluster) -> bool:
    """Whether the limit on this process's cores applies to the other members on this host too.

    Members that connect by a loopback address are in one container and share its limit of CPU time. A CPU affinity
    that the parent process has too was not set for this process alone.
    """
    if not cluster.this.is_loopback:
        return False
    return core_quota() is not None or set(usable_cpus()) == set(usable_cpus(os.getppid()))


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise UserError(
            f"{VARIABLE}={text!r}: it is the number of processes on this machine, from 1; unset it, since "
            "launch.local sets it for the processes that it starts"
        )
    return int(text)
