"""Number of CPU cores that this process may use, by its affinity and the limits of its control groups."""

import math
import os
import pathlib

from towers.control_groups import ROOT, core_quota


def num_cores(root: pathlib.Path = ROOT) -> int:
    """Cores that this process may run on; a limit of 2.5 cores counts as 3.

    Args:
      root: the folder that holds proc/ and sys/.
    """
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota(root)
    return visible if quota is None else max(1, min(visible, math.ceil(quota)))


def may_use_all_cores(root: pathlib.Path = ROOT) -> bool:
    """Whether neither affinity nor a limit keeps this process from some of the machine's cores."""
    return num_cores(root) >= (os.cpu_count() or 1)
