"""Server 0's side of asynchronous steps: which ticket a worker gets, and the update of a worker's gradient."""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from strategies.servers.options import ServersOptions
from strategies.servers.own.handlers import StoreHandlers
from strategies.servers.own.steps.admission import Admission, Ticket
from strategies.servers.own.steps.decisions import DecisionLog
from strategies.servers.own.steps.presence import Presence
from strategies.servers.own.steps.step_results import StepResults
from strategies.servers.own.store import rate_for
from strategies.servers.wire import Message

log = logging.getLogger(__name__)


class AsynchronousSteps:
    """Every gradient is an update. Server 0 decides on it, and the other servers apply it before they are read.

    Attributes:
      admission: issues the tickets; None until the chief's first start.
      done_by_each: what a worker computes, for messages.
      turned_away: number of gradients that came too late; always 0.
    """

    done_by_each, turned_away = "batches", 0

    def __init__(
        self,
        options: ServersOptions,
        store: StoreHandlers,
        results: StepResults,
        presence: Presence,
        *,
        num_workers: int,
    ):
        """Args:
        options: how the group works.
        store: this server's own vectors.
        results: where steps are counted.
        presence: which workers are connected.
        num_workers: number of workers in the cluster.
        """
        self._options, self._num_workers = options, num_workers
        self._store, self._results, self._presence = store, results, presence
        self._log = DecisionLog()
        self.admission: Admission | None = None

    def start(self, first: int, positions: Sequence[int] | None) -> None:
        """For a chief that has set all vectors: steps begin at `first`, the workers' batches at `positions`."""
        self.admission = Admission(
            first,
            bound=self._options.bound,
            num_workers=self._num_workers,
            first_lease=0 if self.admission is None else self.admission.next_lease,
            positions=positions,
            patience_seconds=self._options.worker_timeout_seconds,
            lost=self._presence.lost,
        )
        self._log.restart()

    def positions(self) -> list[int] | None:
        """Each worker's next batch; None if that is the next step's."""
        return self.admission.positions()

    def decided(self) -> dict:
        """The decisions that other servers must know before they are read. The caller holds the results' lock."""
        return dataclasses.asdict(self._log.decisions(self.admission.open_from()))

    def settled(self, end: int) -> None:
        """Notes that all servers applied the decisions before `end`. The caller holds the results' lock."""
        self._log.settled(end)

    def granted(self, ticket: Ticket) -> dict:
        """What a worker must know of its step.

        Warns when the worker begins with the batches of an absent one, once until that one is back.
        """
        owner = self.admission.replaced(ticket.step)
        if self._presence.replace(owner) is not None:
            log.warning(
                "worker:%d is away at step %d: worker:%d computes its batches too",
                *(owner, ticket.step, ticket.worker),
            )
        return {"batch": ticket.batch, "done": ticket.done, "lease": ticket.lease, "part": 0}

    def finish(self, message: Message, change: np.ndarray, gradient: Sequence[np.ndarray]) -> None:
        """Handles this server's piece of a worker's gradient; the other servers have staged theirs."""
        step, finite, figures = message["step"], message["finite"], message["figures"]
        ticket, results = Ticket(step, message["worker"], message["done"], message["lease"]), self._results
        # All under one lock: a worker that this step admits reads the state, and then the parameters, only after
        # the update; a report that counts this step has its figures; and no other worker gets the step meanwhile.
        with results.lock:
            if not self.admission.is_open(ticket):
                return
            staleness = None
            if finite:
                # No other server's staleness is larger: all apply the same updates in the same order, and a worker
                # pulls from server 0 first. So server 0 decides the rate for all.
                staleness = self._store.push(message, gradient)[0]["staleness"]
                rate = rate_for(message["rate"], staleness, aware=message["aware"])
                self._log.add(ticket.lease, rate)
                results.state.add(change)
            if results.stop_at(step, finite=finite):
                self.admission.run_to(0)
            is_taken_over = self.admission.replaced(step) is not None
            worker = f"worker:{message['worker']}"
            results.tally.add_part(worker, figures, staleness, is_taken_over=is_taken_over)
            results.tally.add_step(figures["sums"], figures["norm"], finite=finite)
            # Last: a step whose update failed is not done, and another worker gets it.
            self.admission.use(ticket)

    def close(self) -> None:
        """Nothing to do: no connection is open."""
