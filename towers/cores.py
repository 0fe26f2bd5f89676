"""Number of CPU cores that this process may use, by its affinity and the limits of its control groups."""

import math
import os
import pathlib
from collections.abc import Iterator

_ROOT = pathlib.Path("/")


def num_cores(root: pathlib.Path = _ROOT) -> int:
    """Cores that this process may run on; a limit of 2.5 cores counts as 3.

    Args:
      root: the folder that holds proc/ and sys/.
    """
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota(root)
    return visible if quota is None else max(1, min(visible, math.ceil(quota)))


def core_quota(root: pathlib.Path = _ROOT) -> float | None:
    """CPU time per unit of wall time that Linux allows this process, in cores; None without a limit.

    A control group's limit includes the groups inside it, so the smallest one on the path counts.
    """
    found = [quota(group) for group in _control_groups(root) for quota in (_version_2, _version_1)]
    return min((quota for quota in found if quota), default=None)


def _control_groups(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Folders of this process's CPU control groups, from its own to the outermost.

    In a container, the path that the kernel reports may be one of the machine's, which is not mounted there; its
    outermost folder is then the container's own.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = pathlib.PurePosixPath(path.strip("/"))
        for mount in ("cpu", "cpu,cpuacct") if controllers else ("", "unified"):
            yield from (mounts / mount / group for group in (inner, *inner.parents))
    yield mounts


def _version_2(group: pathlib.Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    return _quotient(quota, period)


def _version_1(group: pathlib.Path) -> float | None:
    return _quotient(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))


def _quotient(quota: str, period: str) -> float | None:
    """None for 'max' and -1, which mean no limit."""
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
