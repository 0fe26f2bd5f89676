"""Server 0's side of synchronous steps: which part a worker gets, and the update of a complete round."""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from strategies.servers.options import ServersOptions
from strategies.servers.own.connections.group import Group
from strategies.servers.own.handlers import KEY, StoreHandlers
from strategies.servers.own.steps.presence import Presence
from strategies.servers.own.steps.rounds import Lease, Rounds
from strategies.servers.own.steps.step_results import StepResults
from strategies.servers.wire import Message
from towers.updates.clipping import Clipping

log = logging.getLogger(__name__)


class SynchronousSteps:
    """The gradients of a round are one update; server 0 makes all servers apply it.

    Attributes:
      admission: the rounds; None until the chief's first start.
      done_by_each: what a worker computes, for messages.
    """

    done_by_each = "part of each batch"

    def __init__(
        self,
        options: ServersOptions,
        store: StoreHandlers,
        results: StepResults,
        presence: Presence,
        *,
        clipping: Clipping,
        num_workers: int,
        connect_others: Callable[[], Group],
    ):
        """Args:
        options: how the group works.
        store: this server's own vectors.
        results: where steps are counted.
        presence: which workers are connected.
        clipping: clipping of averaged gradients.
        num_workers: number of workers in the cluster.
        connect_others: connects to the other servers.
        """
        self._options, self._clipping, self._num_workers = options, clipping, num_workers
        self._store, self._results, self._presence = store, results, presence
        self._connect_others, self._others = connect_others, Group((), ())
        self._lease_numbers = itertools.count()
        # Of the current round: the message and the state's change that came with each lease's gradient.
        self._parts: dict[int, tuple[Message, np.ndarray]] = {}
        self.admission: Rounds | None = None

    def start(self, first: int, positions: Sequence[int] | None) -> None:
        """For a chief that has set all vectors: rounds begin at step `first`, whose batch is the next one."""
        self.admission = Rounds(
            first,
            num_workers=self._num_workers,
            needed=self._num_workers - self._options.backup_workers,
            patience_seconds=self._options.worker_timeout_seconds,
            numbers=self._lease_numbers,
            lost=self._presence.lost,
        )
        if not self._others.connections:
            self._others = self._connect_others()

    @property
    def turned_away(self) -> int:
        """Number of gradients that came too late."""
        return self.admission.turned_away

    def positions(self) -> None:
        """None: a worker's next batch is the next step's."""

    def decided(self) -> None:
        """None: all servers apply an update before it counts."""

    def settled(self, end: int) -> None:
        """Nothing to do: there are no decisions."""

    def granted(self, lease: Lease) -> dict:
        """What a worker must know of its step.

        Warns when the worker replaces another one, once until that one returns. A replaced worker that is still
        connected is late, which counts as a failure.
        """
        is_late = self._presence.replace(lease.replaces, is_first=lease.is_first)
        if is_late is not None:
            if is_late:
                self._results.tally.add_failure(f"worker:{lease.replaces}")
            late = f"gave no gradient within worker_timeout_seconds={self._options.worker_timeout_seconds:g}"
            log.warning(
                "worker:%d %s at step %d: worker:%d takes over its part of the batch",
                *(lease.replaces, late if is_late else "was lost", lease.step, lease.worker),
            )
        return {"batch": lease.step, "done": lease.step, "lease": lease.number, "part": lease.part}

    def finish(self, message: Message, change: np.ndarray, gradient: Sequence[np.ndarray]) -> None:
        """Handles this server's piece of a worker's gradient; the other servers hold theirs."""
        lease = message["lease"]
        if not self._options.backup_workers and not self.admission.admit(lease):
            return
        self._store.hold(message, gradient)
        self._parts[lease] = message, change
        complete = self.admission.give(lease)
        if complete is not None:
            self._finish_round(message["step"], complete)

    def _finish_round(self, step: int, leases: Sequence[Lease]) -> None:
        """Averages the gradients and applies the update on all servers.

        It runs in the thread of the worker that completes the round, so never in two threads at a time.
        """
        results = self._results
        parts = [self._parts[lease.number] for lease in leases]
        weight = sum(message["weight"] for message, _ in parts)
        request = {"key": KEY, "step": step, "leases": [lease.number for lease in leases]}
        squares = [reply["square"] for reply in self._ask_all("square", request)]
        norm = math.sqrt(sum(squares)) / weight if weight else 0.0
        finite = math.isfinite(norm) and all(message["finite"] for message, _ in parts)
        bound = self._clipping.global_norm
        scale = min(1.0, bound / norm) if bound is not None and norm > 0 else 1.0
        apply = {"finite": finite, "weight": weight, "scale": scale, "rate": parts[0][0]["rate"]}
        self._ask_all("apply", request | apply)
        # All under one lock: a report that counts this step has its figures, and no worker begins the next round
        # before the state is updated.
        with results.lock:
            if finite and weight:
                # State that is not averaged changes only by the first worker's change; the others send zeros.
                results.state.add(sum(change for _, change in parts), weight)
            if results.stop_at(step, finite=finite):
                self.admission.run_to(0)
            for (message, _), lease in zip(parts, leases, strict=True):
                is_taken_over = lease.worker != lease.part
                results.tally.add_part(f"worker:{lease.worker}", message["figures"], is_taken_over=is_taken_over)
            sums = _added(message["figures"]["sums"] for message, _ in parts)
            results.tally.add_step(sums, norm, finite=finite)
            self._parts.clear()
            self.admission.applied()

    def _ask_all(self, what: str, request: dict) -> list[Message]:
        """Every server's reply, this server's first."""
        replies_of_others = self._others.start_asking_all(what, **request)
        own = self._store.requests[what](request, ())[0]
        return [own, *(reply for reply, _ in replies_of_others())]

    def close(self) -> None:
        """Closes the connections to the other servers."""
        self._others.close()


def _added(sums: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The (total, weight) pairs of several parts, added by name."""
    total: dict[str, list[float]] = {}
    for part in sums:
        for name, pair in part.items():
            total[name] = [a + b for a, b in zip(total.get(name, (0.0, 0.0)), pair, strict=True)]
    return total
