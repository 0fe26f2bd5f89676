"""Binds processes to NUMA nodes: each stays on the CPUs of one node, or of its part of the nodes.

Linux gives a process memory of the node on which it first writes to it, so memory stays near the process's cores.
"""

import contextlib
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence

from towers.hardware.control_groups import ROOT, core_quota
from towers.hardware.cores import usable_cpus
from towers.hardware.cpu_topology import nodes_of_processes, numa_nodes


def cpus_of_processes(names: Sequence[str], root: pathlib.Path = ROOT) -> Mapping[str, Collection[int]]:
    """The CPUs of each process, by its name; {} if processes are not bound.

    They are bound if there are several nodes of equal size, nodes and processes divide evenly, and no control
    group limits CPU time: all processes share such a limit, wherever they run.

    Args:
      names: the processes that compute; neighbours get the same node, or neighbouring ones.
      root: the folder that holds proc/ and sys/.
    """
    if not names or not hasattr(os, "sched_setaffinity") or core_quota(root) is not None:
        return {}
    found = nodes_of_processes(len(names), numa_nodes(usable_cpus(), root))
    return {} if found is None else dict(zip(names, found, strict=True))


@contextlib.contextmanager
def children_on(cpus: Collection[int] | None) -> Iterator[None]:
    """Context manager: processes that this thread starts run on these CPUs only; None for no change."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
