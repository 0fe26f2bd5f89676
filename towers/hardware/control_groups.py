"""Limits that Linux's control groups (of a container, a Slurm job, a service) set on CPU time and memory.

Files: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/. A group's limit also covers the
groups inside it, so the smallest limit on the path from this process's group to the outermost one applies.
"""

import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path("/")
# Version 1 expresses "no limit" as the largest number of whole pages.
_NO_LIMIT = 2**62


def core_quota(root: pathlib.Path = ROOT) -> float | None:
    """CPU time per unit of wall time that this process may use, in cores; None without a limit.

    Args:
      root: the folder that holds proc/ and sys/.
    """
    return min((quota for group in _folders("cpu", root) for quota in _quotas(group)), default=None)


def memory_limit(root: pathlib.Path = ROOT) -> int | None:
    """Bytes that the processes of this one's control groups may use together; None without a limit."""
    return min((limit for limit, _ in _memory(root)), default=None)


def memory_left(root: pathlib.Path = ROOT) -> int | None:
    """Bytes that this process can still get within its control groups; None without a limit.

    Inactive pages of files do not count as used, because Linux drops them first.
    """
    return min((max(0, limit - used) for limit, used in _memory(root)), default=None)


def _quotas(group: pathlib.Path) -> Iterator[float]:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    pairs = (quota, period), (_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))
    for quota, period in pairs:
        # 'max' and -1 mean no limit.
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)


def _memory(root: pathlib.Path) -> Iterator[tuple[int, int]]:
    """The limit and the use of each group that has a limit, in bytes."""
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for group in _folders("memory", root):
        for limit_name, used_name, droppable in names:
            limit, used = _read(group / limit_name), _read(group / used_name)
            if limit.isdecimal() and int(limit) < _NO_LIMIT:
                yield int(limit), _number(used) - _number(_statistics(group).get(droppable, ""))


def _statistics(group: pathlib.Path) -> dict[str, str]:
    lines = (line.partition(" ") for line in _read(group / "memory.stat").splitlines())
    return {name: value for name, _, value in lines}


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _folders(controller: str, root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Folders of this process's groups for a controller, 'cpu' or 'memory', from its own to the outermost.

    In a container, the path that the kernel reports may be one of the machine's, which is not mounted there; its
    outermost folder is then the container's own.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        # Version 2 has one line without names.
        if controllers and controller not in controllers.split(","):
            continue
        inner = pathlib.PurePosixPath(path.strip("/"))
        # Version 1 mounts "cpu,cpuacct" under this name or, on some systems, with the words exchanged.
        names = {controller, controllers, ",".join(reversed(controllers.split(",")))}
        for mount in names if controllers else ("", "unified"):
            yield from (mounts / mount / group for group in (inner, *inner.parents))
    yield mounts


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
