"""One start of a cluster, from its first process to its last end: who is told to end, and when.

a signal to the launcher   goes to everybody but those who serve; SIGKILL after the grace
a process fails            it is replaced, if it may be; or else the others have the grace to end by themselves,
                           then SIGTERM, then SIGKILL
nobody is left to serve    SIGTERM to those who serve, then SIGKILL after the grace
"""

import time
from collections.abc import Callable, Mapping, Sequence

from launch.supervision.line_relay import LineRelay
from launch.supervision.outcome import Outcome
from launch.supervision.processes import End, Process
from launch.supervision.signals import ForwardedSignals

_TICK_SECONDS = 0.1
# For output that an ended process left in its pipes; more would be waiting for what it started elsewhere.
_LAST_OUTPUT_SECONDS = 1.0


class Supervisor:
    """Waits for the ends of processes, and brings about those that don't come."""

    def __init__(
        self,
        processes: Sequence[Process],
        relay: LineRelay,
        signals: ForwardedSignals,
        *,
        awaited: Mapping[str, Sequence[str]],
        replaced: Callable[[End], Process | None],
        grace_seconds: float,
    ):
        """Args:
        processes: running.
        relay: gets their output.
        signals: that the launcher receives.
        awaited: the processes that serve, by name, and whose ends each of them waits for.
        replaced: called with the end of a process that failed; starts another in its place, or None.
        grace_seconds: how long a process may take to end.
        """
        self._replaced = replaced
        self._running, self._relay, self._signals = list(processes), relay, signals
        self._awaited, self._grace_seconds = awaited, grace_seconds
        self._ends: list[End] = []
        self._outlived: list[End] = []
        self._failed_at: float | None = None
        self._interrupted_at: float | None = None
        for process in processes:
            relay.add(process.name, *process.outputs)

    def run(self) -> Outcome:
        """Until the last process has ended."""
        while self._running:
            self._relay.pass_on(_TICK_SECONDS)
            self._look()
            self._pass_signals_on()
            self._end_who_serves_nobody()
            self._end_after_failure()
            self._kill_overdue()
        self._pass_on_last_output()
        return Outcome(
            ends=tuple(self._ends), outlived=tuple(self._outlived), interrupted=self._interrupted_at is not None
        )

    def _look(self) -> None:
        for process in self._running:
            process.look()
        ended = [process.end for process in self._running if process.end is not None]
        self._running = [process for process in self._running if process.end is None]
        for end in ended:
            failed = end.code != 0 and end.sent is None
            if not (failed and self._is_replaced(end)):
                self._ends.append(end)
                if failed and self._failed_at is None:
                    self._failed_at = time.monotonic()

    def _is_replaced(self, end: End) -> bool:
        """Whether the cluster goes on with another process in the place of one that failed."""
        if self._interrupted_at is not None or self._failed_at is not None:
            return False
        other = self._replaced(end)
        if other is not None:
            self._running.append(other)
            self._relay.add(other.name, *other.outputs)
            self._outlived.append(end)
        return other is not None

    def _pass_signals_on(self) -> None:
        for number in self._signals.take():
            self._interrupted_at = self._interrupted_at or time.monotonic()
            for process in self._running:
                # Who serves is needed until the last of the others has saved.
                if process.name not in self._awaited:
                    process.send(number)

    def _end_who_serves_nobody(self) -> None:
        running = {process.name for process in self._running}
        for process in self._running:
            if process.name in self._awaited and running.isdisjoint(self._awaited[process.name]):
                process.ask_to_end()

    def _end_after_failure(self) -> None:
        """A process that is stopped can't end by itself: there is nothing to wait for."""
        if self._failed_at is None or self._interrupted_at is not None:
            return
        for process in self._running:
            if process.stopped or self._is_over(self._failed_at):
                process.ask_to_end()

    def _kill_overdue(self) -> None:
        interrupted_long_ago = self._interrupted_at is not None and self._is_over(self._interrupted_at)
        for process in self._running:
            in_time = process.name in self._awaited or not interrupted_long_ago
            if not in_time or process.asked_seconds() > self._grace_seconds:
                process.kill()

    def _is_over(self, since: float) -> bool:
        return time.monotonic() - since > self._grace_seconds

    def _pass_on_last_output(self) -> None:
        until = time.monotonic() + _LAST_OUTPUT_SECONDS
        while self._relay.reads and time.monotonic() < until:
            self._relay.pass_on(_TICK_SECONDS)
        self._relay.close()
