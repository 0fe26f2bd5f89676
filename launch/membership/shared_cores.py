"""How many processes share this machine's cores."""

import os
from collections.abc import Mapping

from strategies.cluster import Cluster
from towers.hardware.cores import may_use_all_cores

# Set by launch.local.
VARIABLE = "TOWERS_PROCESSES_HERE"


def processes_here(cluster: Cluster | None, environ: Mapping[str, str] = os.environ) -> int:
    """Number of processes that compute on this machine's cores, this one included.

    The launcher's variable says it. Without it, the members of the cluster that have this process's host count,
    unless this process may use only some of the machine's cores: the rest may be the others'.

    Args:
      cluster: the cluster whose members may share the cores; None for a process that trains alone.
      environ: the environment.
    """
    if VARIABLE in environ:
        return int(environ[VARIABLE])
    if cluster is None or not may_use_all_cores():
        return 1
    return max(1, sum(member.host == cluster.this.host for member in cluster.computing))
