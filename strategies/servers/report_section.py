"""The report of a parameter-server group: figures over some steps, and totals over a run."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

# The section's name in `StepReport.sections` and in summary.json.
SECTION = "parameter_servers"
_MIB = 2**20
# Fields of WorkerFigures that are summed over reports; the others are maxima, or counts since the run began.
SUMMED = ("steps", "taken_over", "busy_seconds", "input_seconds", "staleness_sum")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFigures:
    """One worker over some steps.

    Attributes:
      name: 'worker:1' for the worker with index 1.
      steps: number of its gradients that were used.
      taken_over: number of those that it computed for workers that were lost or late.
      failures: number of times it was lost or late since the beginning of the run.
      busy_seconds: seconds spent computing.
      input_seconds: seconds spent waiting for its batches.
      staleness_sum: sum of its updates' staleness.
      staleness_max: largest staleness of its updates since the beginning of the run.
    """

    name: str
    steps: int
    taken_over: int
    failures: int
    busy_seconds: float
    input_seconds: float
    staleness_sum: int
    staleness_max: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerFigures:
    """One parameter server since the beginning of the run.

    Attributes:
      name: 'ps:0' for the server with index 0.
      kept_bytes: bytes of the parameters and slots that it holds.
      pulls: number of pull requests it answered.
      pushes: number of push requests it answered.
      sent_bytes: bytes it sent.
      received_bytes: bytes it received.
    """

    name: str
    kept_bytes: int
    pulls: int
    pushes: int
    sent_bytes: int
    received_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServersReport:
    """A parameter-server group over some steps; a `strategies.contract.ReportSection`.

    Attributes:
      staleness: number of updates by their staleness. An update's staleness is the number of other updates applied
        between its pull and its push.
      turned_away: number of gradients that came too late and were dropped, since the beginning of the run.
      absent: names of the workers that are not connected, or whose part of a batch other workers compute.
      workers: figures of the workers that sent a gradient or were lost.
      servers: figures of all servers.
    """

    staleness: Mapping[int, int]
    turned_away: int
    absent: tuple[str, ...]
    workers: tuple[WorkerFigures, ...]
    servers: tuple[ServerFigures, ...]

    def fields(self) -> Mapping[str, object]:
        return {"staleness": described_staleness(self.staleness)} if self.staleness else {}

    def scalars(self) -> Mapping[str, float]:
        if not self.staleness:
            return {}
        each = self._staleness_of_each_update()
        return {"staleness/mean": each.mean(), "staleness/max": each.max()}

    def histograms(self) -> Mapping[str, np.ndarray]:
        return {"staleness": self._staleness_of_each_update()} if self.staleness else {}

    def _staleness_of_each_update(self) -> np.ndarray:
        return np.repeat(list(self.staleness.keys()), list(self.staleness.values()))

    def progress_line(self) -> str:
        """The servers since the beginning of the run, and the workers over this report's steps."""
        servers = [
            f"{server.name} {server.sent_bytes / _MIB:,.0f} MiB out {server.received_bytes / _MIB:,.0f} in, "
            f"{server.pulls} pulls {server.pushes} pushes"
            for server in self.servers
        ]
        workers = [_worker_words(worker) for worker in self.workers]
        late = [f"{self.turned_away} gradients came too late"] if self.turned_away else []
        absent = [f"{name} is absent" for name in self.absent]
        return "  ".join([*servers, *workers, *late, *absent])

    def new_totals(self) -> "ServersTotals":
        return ServersTotals()


def _worker_words(worker: WorkerFigures) -> str:
    taken_over = f", {worker.taken_over} for others" if worker.taken_over else ""
    failures = f", lost {worker.failures} times" if worker.failures else ""
    stale = (
        f", staleness {worker.staleness_sum / worker.steps:.1f}" if worker.steps and worker.staleness_sum else ""
    )
    return f"{worker.name} {worker.steps} steps{taken_over}{stale}{failures}"


class ServersTotals:
    """Adds up a group's reports over a run; a `strategies.contract.SectionTotals`."""

    def __init__(self):
        self._staleness: collections.Counter[int] = collections.Counter()
        self._workers: dict[str, dict[str, float]] = {}
        self._last: ServersReport | None = None

    def add(self, section: ServersReport) -> None:
        self._last = section
        self._staleness.update(section.staleness)
        for worker in section.workers:
            before = self._workers.get(worker.name, {})
            now = dataclasses.asdict(worker)
            self._workers[worker.name] = now | {what: now[what] + before.get(what, 0) for what in SUMMED}

    def summary(self) -> Mapping[str, object]:
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

    def table(self) -> Sequence[str]:
        summary = self.summary()
        servers, workers = summary["servers"], summary["workers"]
        fullest = summary["fullest_server"] if len(servers) > 1 else None
        slowest = summary["slowest_worker"] if len(workers) > 1 else None
        return [
            *(_server_row(name, server, is_fullest=name == fullest) for name, server in servers.items()),
            *(_worker_row(name, worker, is_slowest=name == slowest) for name, worker in workers.items()),
        ]


def described_staleness(counts: Mapping[int, int]) -> dict:
    """Mean, maximum and histogram of staleness; None for mean and maximum where there was no update.

    Args:
      counts: number of updates, by their staleness.
    """
    total = sum(counts.values())
    return {
        "mean": sum(staleness * count for staleness, count in counts.items()) / total if total else None,
        "max": max(counts) if counts else None,
        "histogram": {str(staleness): counts[staleness] for staleness in sorted(counts)},
    }


def _server_row(name: str, server: Mapping, *, is_fullest: bool) -> str:
    return (
        f"{name:<10} holds {server['kept_bytes'] / _MIB:8.2f} MiB  {server['pulls']:>7} pulls  "
        f"{server['pushes']:>7} pushes  {server['sent_bytes'] / _MIB:9.1f} MiB out  "
        f"{server['received_bytes'] / _MIB:9.1f} MiB in{'  (fullest)' if is_fullest else ''}"
    )


def _worker_row(name: str, worker: Mapping, *, is_slowest: bool) -> str:
    seconds = worker["seconds_per_step"]
    took = "" if seconds is None else f"{1e3 * seconds:8.1f} ms/step  "
    taken_over = f"{worker['taken_over']} for others  " if worker["taken_over"] else ""
    return (
        f"{name:<10} {worker['steps']:>7} steps  {taken_over}{took}staleness at most {worker['staleness_max']}  "
        f"lost {worker['failures']} times{'  (slowest)' if is_slowest else ''}"
    )
