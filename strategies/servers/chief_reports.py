"""Converts the servers' counts into the chief's reports and counters."""

import math
from collections.abc import Callable, Mapping, Sequence

from strategies.contract import StepReport
from strategies.servers.report_section import SECTION, SUMMED, ServerFigures, ServersReport, WorkerFigures
from strategies.steps.step_report import mean_of
from towers.counters import Counters


class ChiefReports:
    """Differences of counts: servers count from the chief's start, a report from the report before it."""

    def __init__(self, counters: Counters, schedule: Callable[[int], float]):
        """Args:
        counters: the chief's counters.
        schedule: function from a step to its learning rate.
        """
        self._counters, self._schedule = counters, schedule
        self.restart()

    def restart(self) -> None:
        """Notes that the servers now get the counters' values, and count from there."""
        self._given = {name: int(value) for name, value in self._counters.variables().items()}
        self._workers: Mapping[str, Mapping] = {}

    def count(self, done: int, totals: Mapping[str, int]) -> None:
        """Sets the counters: the values given to the servers plus what was counted since then.

        Args:
          done: number of steps done.
          totals: 'steps', 'examples' and 'skipped' since the start.
        """
        self._counters.step.assign(done)
        self._counters.examples.assign(self._given["examples"] + totals["examples"])
        self._counters.updates.assign(self._given["updates"] + totals["steps"] - totals["skipped"])
        self._counters.skipped.assign(self._given["skipped"] + totals["skipped"])

    def report(
        self, figures: Mapping, *, seconds: float, absent: Sequence[str], servers: Sequence[ServerFigures]
    ) -> StepReport:
        """The report of the steps since the last one.

        Args:
          figures: as from `Carrier.report`.
          seconds: seconds that these steps took.
          absent: names of the workers that are not connected.
          servers: figures of all servers.
        """
        means = {name: mean_of(*pair) for name, pair in figures["sums"].items()}
        workers = [self._worker_figures(name, total) for name, total in figures["workers"].items()]
        self._workers = figures["workers"]
        return StepReport(
            step=figures["done"],
            num_steps=figures["num_steps"],
            examples=figures["examples"],
            loss=means.pop("loss", math.nan),
            metrics=means,
            # The rate of the last step, or of the first one if the run was stopped before it.
            learning_rate=self._schedule(max(0, figures["done"] - 1)),
            gradient_norm=math.nan if figures["norm"] is None else figures["norm"],
            skipped=figures["skipped"],
            seconds=seconds,
            input_seconds=max((worker.input_seconds for worker in workers), default=0.0),
            sections={
                SECTION: ServersReport(
                    staleness={int(staleness): count for staleness, count in figures["staleness"]},
                    turned_away=figures["turned_away"],
                    absent=tuple(absent),
                    workers=tuple(workers),
                    servers=tuple(servers),
                )
            },
        )

    def _worker_figures(self, name: str, total: Mapping) -> WorkerFigures:
        """A worker's figures since the last report; failures and the maximum count from the run's beginning."""
        before = self._workers.get(name, {})
        return WorkerFigures(name=name, **(total | {what: total[what] - before.get(what, 0) for what in SUMMED}))
