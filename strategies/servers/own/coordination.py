"""The requests that server 0 alone answers: which worker computes what, the steps' results, the end of the run."""

import dataclasses
import itertools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from strategies.run_settings import Plain, check_same
from strategies.servers.options import ServersOptions
from strategies.servers.own.admission import Admission, Ticket
from strategies.servers.own.decisions import DecisionLog
from strategies.servers.own.group import Group
from strategies.servers.own.handlers import StoreHandlers
from strategies.servers.own.model_state import ModelState
from strategies.servers.own.presence import Presence
from strategies.servers.own.rounds import Lease, Rounds
from strategies.servers.own.store import rate_for
from strategies.servers.tally import Tally
from strategies.servers.wire import Content, Handler, Message
from towers.errors import UserError
from towers.updates.clipping import Clipping

log = logging.getLogger(__name__)

# The longest time that a request waits here for its reply; the client then repeats it, and notices lost servers.
PATIENCE_SECONDS = 2.0
# The key of the vector of all parameters.
KEY = "parameters"
# How a run ends if a process was started with other settings.
REFUSED = "refused"


class Coordination:
    """One method for each request.

    The model's state (batch statistics) is small: server 0 holds all of it. It holds the frozen weights too, since
    each worker asks for them only once.

    Attributes:
      requests: the method that answers a request, by the request's name.
    """

    def __init__(
        self,
        options: ServersOptions,
        clipping: Clipping,
        store: StoreHandlers,
        *,
        num_workers: int,
        stops_if_bad: bool,
        connect_others: Callable[[], Group],
    ):
        """Args:
        options: how the group works.
        clipping: clipping of averaged gradients.
        store: this server's own vectors.
        num_workers: number of workers in the cluster.
        stops_if_bad: whether no step begins after one that was not finite.
        connect_others: connects to the other servers.
        """
        self._options, self._clipping, self._store = options, clipping, store
        self._num_workers, self._connect_others = num_workers, connect_others
        self._stops_if_bad = stops_if_bad
        self._others = Group((), ())
        self._state = ModelState(np.zeros(0), np.zeros(0, bool))
        self._state_lock = threading.Lock()
        self._frozen: Sequence[np.ndarray] = ()
        self._starts = 0
        self._admission: Admission | Rounds | None = None
        self._ready = threading.Event()
        # Of the current round: what the gradient of each lease came with.
        self._parts: dict[int, tuple[Message, np.ndarray]] = {}
        self._lease_numbers = itertools.count()
        self._presence = Presence()
        self._tally, self._log = Tally(), DecisionLog()
        self._bad_step: int | None = None
        self._stop_asked = False
        self._end: str | None = None
        self._settings: Mapping[str, Plain] = {}
        self._joined: set[int] = set()
        self._refusal: UserError | None = None
        self.requests: Mapping[str, Handler] = {
            "start": self.start,
            "run_to": self.run_to,
            "pause": self.pause,
            "report": self.report,
            "get_state": self.get_state,
            "end": self.end,
            "join": self.join,
            "begin": self.begin,
            "frozen": self.frozen,
            "admit": self.admit,
            "finish": self.finish,
        }

    def start(self, message: Message, arrays) -> Content:
        """The chief has set all vectors: workers may begin steps from message["step"] on.

        "positions" are the workers' next batches, as for `BatchOrder`; "state_dtypes" are as for `ModelState`.
        """
        first, options = message["step"], self._options
        state, averaged, *frozen = arrays
        self._state = ModelState(state, averaged, message.get("state_dtypes", ()))
        with self._state_lock:
            self._frozen, self._starts = frozen, self._starts + 1
        self._settings = message.get("settings", {})
        if options.is_sync:
            self._admission = Rounds(
                first,
                num_workers=self._num_workers,
                needed=self._num_workers - options.backup_workers,
                patience_seconds=options.worker_timeout_seconds,
                numbers=self._lease_numbers,
                lost=self._presence.lost,
            )
            if not self._others.connections:
                self._others = self._connect_others()
        else:
            first_lease = 0 if self._admission is None else self._admission.next_lease
            self._admission = Admission(
                first,
                bound=options.bound,
                num_workers=self._num_workers,
                first_lease=first_lease,
                positions=message.get("positions"),
                patience_seconds=options.worker_timeout_seconds,
                lost=self._presence.lost,
            )
            self._log.restart()
        self._bad_step, self._tally = None, Tally()
        self._ready.set()
        return {}, ()

    def run_to(self, message: Message, arrays) -> Content:
        """The chief allows steps below "until" and waits for "wanted" steps to be done; it repeats the request.

        Raises:
          UserError: a worker was started with other settings than the chief.
        """
        self._raise_refusal()
        # Under the lock, or a step that turns out bad in between would not hold the others back.
        with self._state_lock:
            if self._bad_step is None:
                self._admission.run_to(message["until"])
        reached = self._admission.wait(message["wanted"], PATIENCE_SECONDS)
        self._raise_refusal()
        workers = range(self._num_workers)
        reply = {
            "reached": reached,
            "done": self._admission.done,
            "missing": self._admission.missing(workers),
            "absent": self._presence.absent(workers),
            "bad_step": self._bad_step,
        }
        return reply, ()

    def pause(self, message: Message, arrays) -> Content:
        """The chief wants to read everything: no worker begins a step, and the steps that were begun end."""
        idle = self._admission.pause(PATIENCE_SECONDS)
        missing = self._admission.missing(range(self._num_workers))
        positions = None if self._options.is_sync else self._admission.positions()
        return {"idle": idle, "missing": missing, "positions": positions, **self._so_far()}, ()

    def _so_far(self) -> dict:
        with self._state_lock:
            return {"done": self._admission.done, "totals": self._tally.totals(), "decided": self._decided()}

    def _decided(self) -> dict | None:
        """The decisions that other servers must know before they are read; None if there are none to know."""
        if self._options.is_sync:
            return None
        return dataclasses.asdict(self._log.decisions(self._admission.open_from()))

    def report(self, message: Message, arrays) -> Content:
        """The figures of the steps since the last report."""
        turned_away = self._admission.turned_away if self._options.is_sync else 0
        with self._state_lock:
            so_far = {"done": self._admission.done, "totals": self._tally.totals(), "decided": self._decided()}
            figures = {**so_far, **self._tally.take()}
        return {**figures, "turned_away": turned_away, "stop_asked": self._stop_asked}, ()

    def get_state(self, message: Message, arrays) -> Content:
        with self._state_lock:
            return {}, [self._state.read()]

    def end(self, message: Message, arrays) -> Content:
        """The chief ends the run; workers learn how it ended from the reply to their next `begin`."""
        self._end = message["how"]
        if self._admission is not None:
            self._admission.end()
        self._ready.set()
        return {}, ()

    def join(self, message: Message, arrays) -> Content:
        """A worker says what it was started with, before its first step; "again": it is to repeat the request.

        One that was started with other settings than the chief ends the run; but not one that was restarted during
        it: the others go on.

        Raises:
          UserError: this worker, or another one, was started with other settings.
        """
        worker = message["worker"]
        if not self._ready.wait(PATIENCE_SECONDS):
            return {"again": True}, ()
        self._raise_refusal()
        # There are none if the run ended before its start.
        if self._settings:
            try:
                check_same({"chief:0": self._settings, f"worker:{worker}": message["settings"]})
            except UserError as error:
                if worker not in self._joined:
                    self._refusal = error
                raise
        self._joined.add(worker)
        return {}, ()

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def begin(self, message: Message, arrays) -> Content:
        """A worker asks for its next step.

        The reply holds the step, the state, this server's piece of the parameters and, for asynchronous steps, the
        decisions that the other servers must know before the worker pulls; or how the run ended; or "again": the
        worker is to repeat the request. "settled" is the end of the decisions that the worker has passed on, and
        "frozen_of" names the frozen weights that it needs, by the number of the chief's start.
        """
        worker = message["worker"]
        self._note_return(worker)
        self._stop_asked = self._stop_asked or message["stop_asked"]
        if not self._ready.wait(PATIENCE_SECONDS):
            return {"again": True}, ()
        admitted = None
        if self._refusal is None and self._end is None:
            connection = message.get("connection")
            admitted = self._admission.begin(
                worker, PATIENCE_SECONDS, is_lost=lambda: not self._presence.asks_by(worker, connection)
            )
        # Also while it waited for its step.
        self._raise_refusal()
        if admitted is None:
            return ({"end": self._end} if self._end is not None else {"again": True}), ()
        if self._options.is_sync:
            self._note_replacement(admitted)
            ticket = {
                "batch": admitted.step,
                "done": admitted.step,
                "lease": admitted.number,
                "part": admitted.part,
            }
        else:
            self._note_inheritance(admitted)
            ticket = {"batch": admitted.batch, "done": admitted.done, "lease": admitted.lease, "part": 0}
        # All under one lock: the other servers' pieces are then at least as new as this one.
        with self._state_lock:
            self._log.settled(message["settled"])
            state, decided = self._state.read(), self._decided()
            pulled, (piece,) = self._store.pull({"key": KEY}, ())
            frozen_of = self._starts if self._frozen else None
        ticket |= {"decided": decided, "frozen_of": frozen_of}
        return {"step": admitted.step, **ticket, **pulled}, [state, piece]

    def frozen(self, message: Message, arrays) -> Content:
        """The frozen weights, and by "frozen_of" the start that set them."""
        with self._state_lock:
            return {"frozen_of": self._starts}, self._frozen

    def _note_return(self, worker: int) -> None:
        if self._presence.returned(worker):
            what = "part of each batch" if self._options.is_sync else "batches"
            log.warning("worker:%d is back: it computes its %s again", worker, what)

    def _note_replacement(self, lease: Lease) -> None:
        """Warns when a worker is replaced, once until it returns. One that is still connected is late: a loss."""
        is_late = self._presence.replace(lease.replaces, is_first=lease.is_first)
        if is_late is None:
            return
        if is_late:
            self._tally.add_failure(f"worker:{lease.replaces}")
        late = f"gave no gradient within worker_timeout_seconds={self._options.worker_timeout_seconds:g}"
        log.warning(
            "worker:%d %s at step %d: worker:%d takes over its part of the batch",
            *(lease.replaces, late if is_late else "was lost", lease.step, lease.worker),
        )

    def _note_inheritance(self, ticket: Ticket) -> None:
        """Warns when a worker begins with the batches of one that is away, once until that is back."""
        owner = self._admission.replaced(ticket.step)
        if self._presence.replace(owner) is not None:
            log.warning(
                "worker:%d is away at step %d: worker:%d computes its batches too",
                *(owner, ticket.step, ticket.worker),
            )

    def connected(self, worker: int, connection: int) -> None:
        """The worker asks by this connection from now on, until it is lost."""
        self._presence.connect(worker, connection)

    def lost(self, worker: int) -> None:
        """Counts a worker whose connection broke as lost."""
        was_replaced = self._presence.leave(worker)
        if self._end is None and self._admission is not None:
            if not was_replaced:
                self._tally.add_failure(f"worker:{worker}")
            with self._state_lock:
                self._admission.lost(worker)

    def overdue(self) -> set[int]:
        """Workers that held a step, or asked for none, for more than the timeout; others are to do their work."""
        waits = self._end is None and self._admission is not None
        return self._admission.overdue(self._options.timeout_seconds) if waits else set()

    def admit(self, message: Message, arrays) -> Content:
        """Synchronous steps: whether the round takes the gradient of a worker's lease."""
        return {"wanted": self._admission.admit(message["lease"])}, ()

    def finish(self, message: Message, arrays) -> Content:
        """A worker sends server 0's piece of its gradient; the other servers hold or have staged theirs."""
        change, *gradient = arrays
        if self._options.is_sync:
            self._finish_part(message, change, gradient)
        else:
            self._finish_alone(message, change, gradient)
        return {}, ()

    def _finish_alone(self, message, change, gradient) -> None:
        step, finite, figures = message["step"], message["finite"], message["figures"]
        ticket = Ticket(step, message["worker"], message["done"], message["lease"])
        # All under one lock: a worker that this step admits reads the state, and then the parameters, only after
        # the update; a report that counts this step has its figures; and no other worker gets the step meanwhile.
        with self._state_lock:
            if not self._admission.is_open(ticket):
                return
            staleness = None
            if finite:
                # No other server's is larger: all apply the same updates in the same order, and a worker's pull
                # of server 0 is its first. So this one decides the rate for all.
                staleness = self._store.push(message, gradient)[0]["staleness"]
                rate = rate_for(message["rate"], staleness, aware=message["aware"])
                self._log.add(ticket.lease, rate)
                self._state.add(change)
            self._note_bad(step, finite)
            is_taken_over = self._admission.replaced(step) is not None
            self._tally.add_part(f"worker:{message['worker']}", figures, staleness, is_taken_over=is_taken_over)
            self._tally.add_step(figures["sums"], figures["norm"], finite=finite)
            # Last: a step whose update failed is not done, and another worker gets it.
            self._admission.use(ticket)

    def _finish_part(self, message, change, gradient) -> None:
        lease = message["lease"]
        if not self._options.backup_workers and not self._admission.admit(lease):
            return
        self._store.hold(message, gradient)
        self._parts[lease] = message, change
        complete = self._admission.give(lease)
        if complete is not None:
            self._finish_round(message["step"], complete)

    def _finish_round(self, step: int, leases: Sequence[Lease]) -> None:
        """Averages the gradients and applies the update on all servers.

        It runs in the thread of the worker that completes the round, so never in two threads at a time.
        """
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
        # All under one lock, as in `_finish_alone`.
        with self._state_lock:
            if finite and weight:
                # State that is not averaged changes by the first worker's change alone; the others send zeros.
                self._state.add(sum(change for _, change in parts), weight)
            self._note_bad(step, finite)
            for (message, _), lease in zip(parts, leases, strict=True):
                is_taken_over = lease.worker != lease.part
                self._tally.add_part(f"worker:{lease.worker}", message["figures"], is_taken_over=is_taken_over)
            sums = _added(message["figures"]["sums"] for message, _ in parts)
            self._tally.add_step(sums, norm, finite=finite)
            self._parts.clear()
            self._admission.applied()

    def _ask_all(self, what: str, request: dict) -> list[Message]:
        """Every server's reply, this server's first."""
        replies_of_others = self._others.start_asking_all(what, **request)
        own = self._store.requests[what](request, ())[0]
        return [own, *(reply for reply, _ in replies_of_others())]

    def _note_bad(self, step: int, finite: bool) -> None:
        """The caller holds the lock."""
        if not finite and self._stops_if_bad and self._bad_step is None:
            self._bad_step = step
            self._admission.run_to(0)

    def close(self) -> None:
        self._others.close()


def _added(sums) -> dict[str, list[float]]:
    """The (total, weight) pairs of several parts, added by name."""
    total: dict[str, list[float]] = {}
    for part in sums:
        for name, pair in part.items():
            total[name] = [a + b for a, b in zip(total.get(name, (0.0, 0.0)), pair, strict=True)]
    return total
