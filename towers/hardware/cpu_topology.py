"""Which of a machine's CPUs are hyperthreads of one core, and which are on one NUMA node.

A "CPU" is what Linux counts: a hyperthread, or a core without hyperthreads. Two hyperthreads share the arithmetic
units of their core, so a second thread of matrix products on it gains little.

Files: https://docs.kernel.org/admin-guide/cputopology.html and .../abi-stable.html (devices-node). Where they are
missing, as in some sandboxes, each CPU is a core, and all are on one node.
"""

import pathlib
from collections.abc import Collection, Sequence

from towers.hardware.control_groups import ROOT

# If nodes' numbers of CPUs differ by more than this fraction, processes are not bound to nodes: all would wait for
# the process on the smallest node.
_LARGEST_DIFFERENCE = 1 / 8


def physical_cores(cpus: Collection[int], root: pathlib.Path = ROOT) -> int:
    """Number of cores that have at least one of these CPUs.

    Args:
      cpus: numbers of CPUs, as `os.sched_getaffinity` gives them.
      root: the folder that holds sys/.
    """
    folder = root / "sys/devices/system/cpu"
    siblings = (_listed(folder / f"cpu{cpu}/topology/thread_siblings_list") | {cpu} for cpu in cpus)
    return len({min(of_core) for of_core in siblings})


def numa_nodes(cpus: Collection[int], root: pathlib.Path = ROOT) -> Sequence[frozenset[int]]:
    """These CPUs grouped by NUMA node, in the order of the nodes, without empty groups."""
    folder = root / "sys/devices/system/node"
    names = sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    nodes = [frozenset(_listed(path / "cpulist") & set(cpus)) for path in names]
    nodes = [node for node in nodes if node]
    return nodes if frozenset().union(*nodes) == frozenset(cpus) else [frozenset(cpus)]


def nodes_of_processes(count: int, nodes: Sequence[frozenset[int]]) -> Sequence[frozenset[int]] | None:
    """The CPUs of each of `count` processes, which are divided evenly over the nodes, neighbours side by side.

    Several processes share a node, or a process has several. None if there is one node or one process, if
    processes and nodes do not divide evenly, or if some nodes have far fewer of these CPUs: then each process may
    use all CPUs.
    """
    sizes = [len(node) for node in nodes]
    if len(nodes) < 2 or count < 2 or max(sizes) - min(sizes) > _LARGEST_DIFFERENCE * max(sizes):
        return None
    if len(nodes) % count == 0:
        each = len(nodes) // count
        return [frozenset().union(*nodes[index * each : (index + 1) * each]) for index in range(count)]
    if count % len(nodes) == 0:
        return [nodes[index * len(nodes) // count] for index in range(count)]
    return None


def _listed(path: pathlib.Path) -> set[int]:
    """The numbers in a file such as '0-3,8'; none if there is no such file."""
    try:
        ranges = [part.split("-") for part in path.read_text(encoding="ascii").strip().split(",") if part]
        return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}
    except (OSError, ValueError):
        return set()
