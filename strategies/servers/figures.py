"""What a parameter-server group did over a run: for summary.json, and as lines for a person."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from strategies.contract import ServersReport, StepReport

_MIB = 2**20
# What adds up over reports; the rest is a maximum or counted since the beginning.
_SUMMED = ("steps", "busy_seconds", "input_seconds", "staleness_sum")


def described_staleness(counts: Mapping[int, int]) -> dict:
    """Mean, maximum and histogram of some updates' staleness; None where there was no update."""
    total = sum(counts.values())
    return {
        "mean": sum(staleness * count for staleness, count in counts.items()) / total if total else None,
        "max": max(counts) if counts else None,
        "histogram": {str(staleness): counts[staleness] for staleness in sorted(counts)},
    }


class GroupFigures:
    """Gathers the reports of a run."""

    def __init__(self):
        self._staleness: collections.Counter[int] = collections.Counter()
        self._workers: dict[str, dict[str, float]] = {}
        self._last: ServersReport | None = None

    def add(self, report: ServersReport) -> None:
        """Those of some more steps."""
        self._last = report
        self._staleness.update(report.staleness)
        for worker in report.workers:
            before = self._workers.get(worker.name, {})
            now = dataclasses.asdict(worker)
            self._workers[now.pop("name")] = now | {what: now[what] + before.get(what, 0) for what in _SUMMED}

    def summary(self) -> dict | None:
        """For summary.json; None where there is no group."""
        if self._last is None:
            return None
        times = {
            name: (own["busy_seconds"] + own["input_seconds"]) / own["steps"]
            for name, own in self._workers.items()
            if own["steps"]
        }
        return {
            "staleness": described_staleness(self._staleness),
            "turned_away": self._last.turned_away,
            "workers": {name: own | {"seconds_per_step": times.get(name)} for name, own in self._workers.items()},
            "slowest_worker": max(times, key=times.get) if times else None,
            "servers": {server.name: dataclasses.asdict(server) for server in self._last.servers},
            "fullest_server": max(self._last.servers, key=lambda server: server.kept_bytes).name,
        }


def group_line(report: StepReport) -> str:
    """Everyone in one line: servers since the beginning, workers over the report's steps."""
    group = report.servers
    servers = [
        f"{server.name} {server.sent_bytes / _MIB:,.0f} MiB out {server.received_bytes / _MIB:,.0f} in, "
        f"{server.pulls} pulls {server.pushes} pushes"
        for server in group.servers
    ]
    workers = [_worker_words(worker) for worker in group.workers]
    late = [f"{group.turned_away} came too late"] if group.turned_away else []
    absent = [f"{name} is not there" for name in group.absent]
    return "  ".join([*servers, *workers, *late, *absent])


def _worker_words(worker) -> str:
    failures = f", lost {worker.failures} times" if worker.failures else ""
    stale = (
        f", staleness {worker.staleness_sum / worker.steps:.1f}" if worker.steps and worker.staleness_sum else ""
    )
    return f"{worker.name} {worker.steps} steps{stale}{failures}"


def table(summary: Mapping) -> Sequence[str]:
    """The group of a run's summary, line by line."""
    lines = []
    for name, server in summary["servers"].items():
        fullest = "  (fullest)" if name == summary["fullest_server"] and len(summary["servers"]) > 1 else ""
        lines.append(
            f"{name:<10} keeps {server['kept_bytes'] / _MIB:8.2f} MiB  {server['pulls']:>7} pulls  "
            f"{server['pushes']:>7} pushes  {server['sent_bytes'] / _MIB:9.1f} MiB out  "
            f"{server['received_bytes'] / _MIB:9.1f} MiB in{fullest}"
        )
    for name, worker in summary["workers"].items():
        slowest = "  (slowest)" if name == summary["slowest_worker"] and len(summary["workers"]) > 1 else ""
        seconds = worker["seconds_per_step"]
        took = "" if seconds is None else f"{1e3 * seconds:8.1f} ms/step  "
        lines.append(
            f"{name:<10} {worker['steps']:>7} steps  {took}staleness at most {worker['staleness_max']}  "
            f"lost {worker['failures']} times{slowest}"
        )
    return lines
