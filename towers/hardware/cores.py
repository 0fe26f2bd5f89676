"""Number of CPU cores that this process may use, by its affinity and the limits of its control groups."""

import contextlib
import math
import os
import pathlib
from collections.abc import Collection

from towers.hardware.control_groups import ROOT, core_quota
from towers.hardware.cpu_topology import physical_cores

# More cores than any machine has; a hundred thousand threads would bring a machine to a standstill.
MOST_CORES = 4096


def num_cores(root: pathlib.Path = ROOT) -> int:
    """Cores that this process may run on. Hyperthreads of a core count once; a limit of 2.5 cores counts as 3.

    Args:
      root: the folder that holds proc/ and sys/.
    """
    cores, quota = physical_cores(usable_cpus(), root), core_quota(root)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def usable_cpus(process: int = 0) -> Collection[int]:
    """Numbers of the CPUs in a process's affinity, by default in this one's; hyperthreads count.

    All CPUs of the machine if there is no such process.
    """
    if hasattr(os, "sched_getaffinity"):
        with contextlib.suppress(OSError):
            return os.sched_getaffinity(process)
    return range(os.cpu_count() or 1)


def may_use_all_cores(root: pathlib.Path = ROOT) -> bool:
    """Whether neither affinity nor a limit keeps this process from some of the machine's cores."""
    cpus = usable_cpus()
    return len(cpus) >= (os.cpu_count() or 1) and num_cores(root) >= physical_cores(cpus, root)


def input_threads(cores: int, num_gpus: int = 0) -> int:
    """Number of threads that prepare batches for towers on so many cores and GPUs.

    One for each 16 cores, at least 2: towers on CPUs need the others. With GPUs two for each, as one was measured,
    but on at most half of the cores, since the others start the GPUs' kernels.
    """
    return max(2, cores // 16, min(2 * num_gpus, cores // 2))
