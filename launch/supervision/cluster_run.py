"""Runs a cluster on this machine, with restarts: the environment of its processes and the launcher's messages."""

import collections
import contextlib
import dataclasses
import os
import pathlib
import secrets
import signal
import time
from collections.abc import Mapping

from launch import binary
from launch.membership.roles import Roles
from launch.membership.shared_cores import VARIABLE as PROCESSES_HERE
from launch.membership.shared_gpus import environment_of_shared
from launch.membership.tf_config import tf_config_text
from launch.supervision.group_guard import GroupGuard
from launch.supervision.line_relay import LineRelay
from launch.supervision.node_binding import children_on, cpus_of_processes
from launch.supervision.outcome import Outcome, described, failure_report
from launch.supervision.planned_faults import FAULT_VARIABLE, PlannedFault
from launch.supervision.processes import Exit, Process
from launch.supervision.rank_log import RankLog
from launch.supervision.restart_pauses import RestartPauses
from launch.supervision.screen import Screen, print_line, screen_for
from launch.supervision.signals import ForwardedSignals
from launch.supervision.supervisor import Replacement, Supervisor
from strategies.cluster import Cluster
from towers.errors import UserError

# Seconds until a pause notices a signal.
_TICK_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A cluster to run, and how to run it.

    Attributes:
      command: the command that every process runs.
      variables: variables that the command needs in its environment.
      roles: the processes of the cluster.
      directory: the run's directory; absolute.
      faults: the planned faults of the first start, by the name of the process.
      max_restarts: maximum number of restarts after failures, those of single processes included.
      seconds_to_notice: seconds that processes have to end after another one failed, before SIGTERM.
      seconds_to_save: seconds that processes have to end after a signal, before SIGKILL.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str]
    roles: Roles
    directory: pathlib.Path
    faults: Mapping[str, PlannedFault]
    max_restarts: int
    seconds_to_notice: float
    seconds_to_save: float


class LocalRun:
    """Starts the cluster, restarts it after failures, and reports how it ended."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._signals = ForwardedSignals()
        self._guard = GroupGuard()
        self._secret = secrets.token_hex(16)
        self._cpus = cpus_of_processes(plan.roles.computing)
        self._start = self._restarts = 0
        self._logs: Mapping[str, RankLog] = {}
        self._faults_seen: set[PlannedFault] = set()
        self._cluster_pauses = RestartPauses()
        # By the name of the replaced process.
        self._pauses: Mapping[str, RestartPauses] = collections.defaultdict(RestartPauses)

    def run(self) -> int:
        """Runs the cluster to its end; returns the launcher's exit code.

        Raises:
          UserError: a log can't be written; a planned fault did not happen.
        """
        with self._signals, self._guard:
            outcome = self._run_once()
            while self._may_restart(outcome):
                self._wait(self._reported_pause(outcome.cause, self._cluster_pauses))
                if self._is_ending():
                    return self._reported_interruption()
                outcome = self._run_once()
        self._report_losses(outcome)
        if outcome.cause is not None:
            self._report_failure(outcome)
        elif outcome.code == binary.DONE:
            self._report_recovery()
        return outcome.code

    def _run_once(self) -> Outcome:
        """Starts the cluster and waits for its last process to end. Leaves no process, whatever happens."""
        self._start += 1
        plan = self._plan
        with contextlib.ExitStack() as stack:
            self._logs = {
                name: stack.enter_context(RankLog(plan.directory / "logs", name, self._start))
                for name in plan.roles.names
            }
            screen = stack.enter_context(contextlib.closing(self._screen()))
            clusters = {cluster.this.name: cluster for cluster in plan.roles.clusters()}
            processes = [
                stack.enter_context(contextlib.closing(self._started(cluster))) for cluster in clusters.values()
            ]

            def replacement(failed: Exit) -> Replacement | None:
                may_be_alone = failed.name in (*plan.roles.replaceable, *plan.roles.followed())
                is_allowed = may_be_alone and self._has_restarts_left()
                if not is_allowed or not Outcome.may_be_replaced(failed):
                    return None
                pause_seconds = self._reported_pause(failed, self._pauses[failed.name])

                def start() -> Process:
                    process = self._started(clusters[failed.name], is_replacement=True)
                    return stack.enter_context(contextlib.closing(process))

                return Replacement(name=failed.name, at=time.monotonic() + pause_seconds, start=start)

            outcome = Supervisor(
                processes,
                LineRelay(screen, self._logs),
                self._signals,
                awaited=plan.roles.awaited(),
                replacement=replacement,
                replaceable=plan.roles.replaceable,
                followed=plan.roles.followed(),
                seconds_to_notice=plan.seconds_to_notice,
                seconds_to_save=plan.seconds_to_save,
            ).run()
        if self._start == 1:
            self._faults_seen = {fault for fault in plan.faults.values() if fault.is_seen_in(outcome)}
        return outcome

    def _screen(self) -> Screen:
        return screen_for(self._plan.roles.names, self._plan.roles.reporter, self._is_ending)

    def _print(self, text: str, *, is_error: bool = False) -> None:
        print_line(text, is_error=is_error, is_ending=self._is_ending)

    def _is_ending(self) -> bool:
        """Whether the launcher was asked to stop."""
        return self._signals.first is not None

    def _started(self, cluster: Cluster, *, is_replacement: bool = False) -> Process:
        environment = self._environment(cluster, is_replacement)
        with children_on(self._cpus.get(cluster.this.name)):
            return Process(cluster.this.name, self._plan.command, environment, self._guard)

    def _num_sharing(self, name: str) -> int:
        """Number of processes that compute on the same cores as this one, itself included."""
        if name not in self._cpus:
            return self._plan.roles.num_computing
        return list(self._cpus.values()).count(self._cpus[name])

    def _environment(self, cluster: Cluster, is_replacement: bool) -> dict[str, str]:
        is_first = self._start == 1 and not is_replacement
        fault = self._plan.faults.get(cluster.this.name) if is_first else None
        inherited = {name: value for name, value in os.environ.items() if name != FAULT_VARIABLE}
        return inherited | {
            **self._plan.variables,
            "TF_CONFIG": tf_config_text(cluster),
            "PYTHONUNBUFFERED": "1",
            "TOWERS_RUN_DIRECTORY": str(self._plan.directory),
            "TOWERS_SECRET": self._secret,
            PROCESSES_HERE: str(self._num_sharing(cluster.this.name)),
            **environment_of_shared(),
            **({} if fault is None else {FAULT_VARIABLE: fault.order}),
        }

    def _may_restart(self, outcome: Outcome) -> bool:
        return outcome.may_be_restarted and not self._is_ending() and self._has_restarts_left()

    def _has_restarts_left(self) -> bool:
        return self._restarts < self._plan.max_restarts

    def _reported_pause(self, cause: Exit, pauses: RestartPauses) -> int:
        """Counts and reports a restart; returns how many seconds to wait before it."""
        self._restarts += 1
        seconds = pauses.after(lived_seconds=cause.lived_seconds)
        when = f" in {seconds} s" if seconds else ""
        self._print(
            f"restart {self._restarts} of {self._plan.max_restarts}{when}: {cause.name} failed: "
            f"{described(cause)}; its log: {self._logs[cause.name].path}"
        )
        return seconds

    def _wait(self, seconds: float) -> None:
        """Waits, but no longer than until a signal."""
        until = time.monotonic() + seconds
        while not self._is_ending() and time.monotonic() < until:
            time.sleep(_TICK_SECONDS)

    def _reported_interruption(self) -> int:
        """Reports a signal during a pause, where no process can report it; returns the launcher's exit code."""
        name = signal.Signals(self._signals.first).name
        self._print(f"interrupted by {name} before restart {self._restarts}", is_error=True)
        return binary.INTERRUPTED

    def _report_losses(self, outcome: Outcome) -> None:
        for lost in outcome.lost:
            self._print(
                f"warning: {lost.name} was lost: {described(lost)}; the others continued without it; its log: "
                f"{self._logs[lost.name].path}",
                is_error=True,
            )

    def _report_failure(self, outcome: Outcome) -> None:
        tails = {name: log.tail for name, log in self._logs.items()}
        paths = {name: log.path for name, log in self._logs.items()}
        for line in failure_report(outcome, tails, paths):
            self._print(line, is_error=True)

    def _report_recovery(self) -> None:
        """Reports that the cluster recovered from each planned fault.

        Raises:
          UserError: a fault did not happen.
        """
        for fault in self._plan.faults.values():
            if fault not in self._faults_seen:
                raise UserError(
                    f"{fault.flag}: the fault did not happen, because {fault.name} did not begin step "
                    f"{fault.step} before any restart; choose an earlier step"
                )
            self._print(fault.recovered(self._restarts))
