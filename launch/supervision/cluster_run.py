"""A cluster on this machine from its first start to its last: what its processes are given, what is said."""

import contextlib
import dataclasses
import os
import pathlib
import secrets
from collections.abc import Mapping

from launch import binary
from launch.membership.roles import Roles
from launch.membership.tf_config import tf_config_text
from launch.supervision.group_guard import GroupGuard
from launch.supervision.line_relay import LineRelay
from launch.supervision.outcome import Outcome, described, last_words
from launch.supervision.planned_faults import FAULT_VARIABLE, PlannedFault
from launch.supervision.processes import End, Process
from launch.supervision.rank_log import RankLog
from launch.supervision.screen import screen_for, tell
from launch.supervision.signals import ForwardedSignals
from launch.supervision.supervisor import Supervisor
from strategies.cluster import Cluster
from towers.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be run.

    Attributes:
      command: the same for every process.
      variables: added to the environment of every process.
      roles: who there is.
      directory: of the run; absolute.
      faults: of the first start, by the process's name.
      max_restarts: how often the cluster is started again after a failure.
      grace_seconds: how long a process may take to end.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str]
    roles: Roles
    directory: pathlib.Path
    faults: Mapping[str, PlannedFault]
    max_restarts: int
    grace_seconds: float


class LocalRun:
    """Starts the cluster, again after a failure that another start may mend, and says how it ended."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._signals = ForwardedSignals()
        self._guard = GroupGuard()
        self._secret = secrets.token_hex(16)
        self._start = self._restarts = 0
        self._logs: Mapping[str, RankLog] = {}
        self._faults_seen: set[PlannedFault] = set()

    def run(self) -> int:
        """The launcher's exit code.

        Raises:
          UserError: a log can't be written; or a planned fault did not happen.
        """
        with self._signals, self._guard:
            outcome = self._run_once()
            while self._may_start_again(outcome):
                self._restarts += 1
                self._tell_restart(outcome.cause)
                outcome = self._run_once()
        if outcome.cause is not None:
            self._tell_failure(outcome)
        elif outcome.code == binary.DONE:
            self._tell_recovery()
        return outcome.code

    def _run_once(self) -> Outcome:
        """From the first process to the last end; whatever happens in between, no process is left."""
        self._start += 1
        plan = self._plan
        with contextlib.ExitStack() as ends:
            self._logs = {
                name: ends.enter_context(RankLog(plan.directory / "logs", name, self._start))
                for name in plan.roles.names
            }
            screen = ends.enter_context(contextlib.closing(screen_for(plan.roles.names, plan.roles.reporter)))
            clusters = {cluster.this.name: cluster for cluster in plan.roles.clusters()}
            processes = [
                ends.enter_context(contextlib.closing(self._started(cluster))) for cluster in clusters.values()
            ]

            def replaced(end: End) -> Process | None:
                if end.name not in plan.roles.replaceable or not Outcome.may_be_mended(end) or self._are_used_up():
                    return None
                self._restarts += 1
                self._tell_restart(end)
                cluster = clusters[end.name]
                return ends.enter_context(contextlib.closing(self._started(cluster, again=True)))

            outcome = Supervisor(
                processes,
                LineRelay(screen, self._logs),
                self._signals,
                awaited=plan.roles.awaited(),
                replaced=replaced,
                grace_seconds=plan.grace_seconds,
            ).run()
        if self._start == 1:
            self._faults_seen = {fault for fault in plan.faults.values() if fault.is_seen_in(outcome)}
        return outcome

    def _started(self, cluster: Cluster, *, again: bool = False) -> Process:
        return Process(cluster.this.name, self._plan.command, self._environment(cluster, again), self._guard)

    def _environment(self, cluster: Cluster, again: bool) -> dict[str, str]:
        fault = self._plan.faults.get(cluster.this.name) if self._start == 1 and not again else None
        inherited = {name: value for name, value in os.environ.items() if name != FAULT_VARIABLE}
        return inherited | {
            **self._plan.variables,
            "TF_CONFIG": tf_config_text(cluster),
            "PYTHONUNBUFFERED": "1",
            "TOWERS_RUN_DIRECTORY": str(self._plan.directory),
            "TOWERS_SECRET": self._secret,
            "TOWERS_PROCESSES_HERE": str(self._plan.roles.num_computing),
            **({} if fault is None else {FAULT_VARIABLE: fault.order}),
        }

    def _may_start_again(self, outcome: Outcome) -> bool:
        asked_to_stop = self._signals.first is not None
        return outcome.can_be_mended and not asked_to_stop and not self._are_used_up()

    def _are_used_up(self) -> bool:
        return self._restarts >= self._plan.max_restarts

    def _tell_restart(self, cause: End) -> None:
        where = self._logs[cause.name].path
        tell(
            f"restart {self._restarts} of {self._plan.max_restarts}: {cause.name} failed: {described(cause)}; "
            f"its last lines stand in {where}"
        )

    def _tell_failure(self, outcome: Outcome) -> None:
        tails = {name: log.tail for name, log in self._logs.items()}
        paths = {name: log.path for name, log in self._logs.items()}
        for line in last_words(outcome, tails, paths):
            tell(line, is_error=True)

    def _tell_recovery(self) -> None:
        """That the cluster went on after the planned faults.

        Raises:
          UserError: one did not happen.
        """
        for fault in self._plan.faults.values():
            if fault not in self._faults_seen:
                raise UserError(
                    f"{fault.flag}: it did not happen, {fault.name} began no step {fault.step}; "
                    "name a step that it takes in its first start"
                )
            tell(fault.recovered(self._restarts))
