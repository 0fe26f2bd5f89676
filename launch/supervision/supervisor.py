"""Supervises one start of a cluster until its last process has ended: which process must end, and when.

the launcher gets a signal   sends it to all processes except those that serve; SIGKILL after the time to save
a process fails              replaces it if possible, perhaps after a pause; otherwise gives the others the time
                             to notice and to end by themselves, then sends SIGTERM, and SIGKILL after the time
                             to save
a worker of servers is lost  nothing, while another worker runs: training continues
an evaluator is lost         nothing: no other process needs it
the evaluated run fails      SIGTERM to the evaluator, SIGKILL after the time to save
nobody is left to serve      SIGTERM to those that serve, SIGKILL after the time to save
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from launch.supervision.line_relay import LineRelay
from launch.supervision.outcome import Outcome
from launch.supervision.processes import Exit, Process
from launch.supervision.signals import ForwardedSignals

_TICK_SECONDS = 0.1
# Time to read what an ended process left in its pipes. A process that it started in another session may hold them
# open for longer.
_LAST_OUTPUT_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replacement:
    """A process that replaces one that failed.

    Attributes:
      name: as 'worker:1'.
      at: when to start it, in the time of `time.monotonic`.
      start: starts it.
    """

    name: str
    at: float
    start: Callable[[], Process]


class Supervisor:
    """Waits for processes to end, and ends those that don't."""

    def __init__(
        self,
        processes: Sequence[Process],
        relay: LineRelay,
        signals: ForwardedSignals,
        *,
        awaited: Mapping[str, Sequence[str]],
        replacement: Callable[[Exit], Replacement | None],
        replaceable: Collection[str],
        followed: Mapping[str, Sequence[str]] = MappingProxyType({}),
        seconds_to_notice: float,
        seconds_to_save: float,
    ):
        """Args:
        processes: the running processes.
        relay: gets their output.
        signals: the signals that the launcher receives.
        awaited: by the name of each process that serves, the processes that it serves until they have ended.
        replacement: gets the exit of a failed process; returns what replaces it, or None.
        replaceable: names of interchangeable processes: the others need only one of them.
        followed: by the name of each process that no other one needs, the processes that it follows.
        seconds_to_notice: seconds that processes have to end after another one failed, before SIGTERM.
        seconds_to_save: seconds that processes have to end after a signal, before SIGKILL.
        """
        self._replacement, self._replaceable = replacement, replaceable
        self._running, self._relay, self._signals = list(processes), relay, signals
        self._awaited, self._followed = awaited, followed
        self._seconds_to_notice, self._seconds_to_save = seconds_to_notice, seconds_to_save
        self._exits: list[Exit] = []
        self._replaced: list[Exit] = []
        self._waiting: list[Replacement] = []
        self._failed_at: float | None = None
        self._interrupted_at: float | None = None
        for process in processes:
            relay.add(process.name, *process.outputs)

    def run(self) -> Outcome:
        """Supervises until the last process has ended; returns the outcome."""
        while self._running or self._waiting:
            self._relay.pass_on(_TICK_SECONDS)
            self._collect_exits()
            self._forward_signals()
            self._start_replacements()
            self._end_idle_servers()
            self._end_after_failure()
            self._kill_overdue()
        self._pass_on_last_output()
        return Outcome(
            exits=tuple(self._exits),
            replaced=tuple(self._replaced),
            interrupted=self._interrupted_at is not None,
            awaited=self._awaited,
            followed=self._followed,
        )

    def _collect_exits(self) -> None:
        for process in self._running:
            process.poll()
        found = [process.exit for process in self._running if process.exit is not None]
        self._running = [process for process in self._running if process.exit is None]
        for found_exit in found:
            failed = found_exit.code != 0 and found_exit.sent is None
            if not (failed and self._replace(found_exit)):
                self._exits.append(found_exit)
                if failed and self._failed_at is None and not self._goes_on_without(found_exit):
                    self._failed_at = time.monotonic()

    def _goes_on_without(self, failed: Exit) -> bool:
        """Whether a process was lost that the others can do without."""
        others = not self._present.isdisjoint(self._replaceable)
        is_spare = failed.name in self._followed or (failed.name in self._replaceable and others)
        return is_spare and Outcome.is_loss(failed)

    def _replace(self, failed: Exit) -> bool:
        """Plans a replacement for a failed process if possible; returns whether it did."""
        is_tied = failed.name in self._awaited or failed.name in self._followed
        if self._is_ending or (is_tied and self._is_idle(failed.name)):
            return False
        planned = self._replacement(failed)
        if planned is not None:
            self._waiting.append(planned)
            self._replaced.append(failed)
        return planned is not None

    def _start_replacements(self) -> None:
        """Starts each replacement whose time has come. A replacement that nobody needs any more is not started.

        An evaluator is still needed when those that it follows have ended: it has to read their last checkpoint.
        """
        for planned in list(self._waiting):
            is_unneeded = planned.name in self._awaited and self._is_idle(planned.name)
            if self._is_ending or is_unneeded:
                self._waiting.remove(planned)
            elif time.monotonic() >= planned.at:
                self._waiting.remove(planned)
                process = planned.start()
                self._running.append(process)
                self._relay.add(process.name, *process.outputs)

    @property
    def _is_ending(self) -> bool:
        """Whether all processes are to end."""
        return self._interrupted_at is not None or self._failed_at is not None

    @property
    def _present(self) -> set[str]:
        """The names of the processes that run or will be started again."""
        return {each.name for each in (*self._running, *self._waiting)}

    def _forward_signals(self) -> None:
        for number in self._signals.take():
            self._interrupted_at = self._interrupted_at or time.monotonic()
            for process in self._running:
                # A process that serves is needed until the last of the others has saved.
                if process.name not in self._awaited:
                    process.forward(number)

    def _end_idle_servers(self) -> None:
        """Ends each process that serves when all processes that it serves have ended."""
        for process in self._running:
            if process.name in self._awaited and self._is_idle(process.name):
                process.ask_to_end()

    def _is_idle(self, name: str) -> bool:
        """Whether all processes that this one serves or follows have ended."""
        others = {**self._followed, **self._awaited}[name]
        return self._present.isdisjoint(others)

    def _end_after_failure(self) -> None:
        """After a failure, ends the other processes: at once those that can't end or notice by themselves.

        A stopped process can't end. An evaluator does not notice that those that it follows have ended.
        """
        if self._failed_at is None or self._interrupted_at is not None:
            return
        for process in self._running:
            is_left_alone = process.name in self._followed and self._is_idle(process.name)
            is_late = time.monotonic() - self._failed_at > self._seconds_to_notice
            if process.is_stopped or is_left_alone or is_late:
                process.ask_to_end()

    def _kill_overdue(self) -> None:
        since = self._interrupted_at
        interrupted_long_ago = since is not None and time.monotonic() - since > self._seconds_to_save
        for process in self._running:
            in_time = process.name in self._awaited or not interrupted_long_ago
            if not in_time or process.asked_seconds() > self._seconds_to_save:
                process.kill()

    def _pass_on_last_output(self) -> None:
        until = time.monotonic() + _LAST_OUTPUT_SECONDS
        while self._relay.reads and time.monotonic() < until:
            self._relay.pass_on(_TICK_SECONDS)
        self._relay.close()
