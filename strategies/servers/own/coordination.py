"""The requests that server 0 alone answers: the chief's, which drive the run, and the workers' for their steps.

What differs between the two kinds of steps is in `asynchronous_steps.py` and `synchronous_steps.py`.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from strategies.run_settings import Plain, check_same
from strategies.servers.options import ServersOptions
from strategies.servers.own.connections.group import Group
from strategies.servers.own.handlers import KEY, StoreHandlers
from strategies.servers.own.steps.asynchronous_steps import AsynchronousSteps
from strategies.servers.own.steps.model_state import ModelState
from strategies.servers.own.steps.presence import Presence
from strategies.servers.own.steps.step_results import StepResults
from strategies.servers.own.steps.synchronous_steps import SynchronousSteps
from strategies.servers.wire import Content, Handler, Message
from towers.errors import UserError
from towers.updates.clipping import Clipping

log = logging.getLogger(__name__)

# The longest time before a request is answered; the client then repeats it, and so detects lost servers.
PATIENCE_SECONDS = 2.0
# The end of a run in which a process was started with other settings.
REFUSED = "refused"


class Coordination:
    """One method for each request.

    The model's state (batch statistics) is small, so server 0 holds all of it. It also holds the frozen weights,
    because each worker requests them only once.

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
        self._timeout_seconds, self._store, self._num_workers = options.timeout_seconds, store, num_workers
        self._presence, self._results = Presence(), StepResults(stops_if_bad=stops_if_bad)
        self._steps: AsynchronousSteps | SynchronousSteps
        common = options, store, self._results, self._presence
        if options.is_sync:
            self._steps = SynchronousSteps(
                *common, clipping=clipping, num_workers=num_workers, connect_others=connect_others
            )
        else:
            self._steps = AsynchronousSteps(*common, num_workers=num_workers)
        self._frozen: Sequence[np.ndarray] = ()
        self._starts = 0
        self._ready = threading.Event()
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
        """Request of the chief, which has set all vectors: workers may begin steps from message["step"] on.

        "positions" are the workers' next batches, as for `BatchOrder`; "state_dtypes" are as for `ModelState`.
        """
        state, averaged, *frozen = arrays
        with self._results.lock:
            self._frozen, self._starts = frozen, self._starts + 1
        self._settings = message.get("settings", {})
        before = self._steps.admission
        self._steps.start(message["step"], message.get("positions"))
        self._results.restart(ModelState(state, averaged, message.get("state_dtypes", ())))
        if before is not None:
            # A run that resumes starts twice. This makes workers that waited since the first start ask again at
            # once.
            before.end()
        self._ready.set()
        return {}, ()

    def run_to(self, message: Message, arrays) -> Content:
        """Repeated request of the chief: allows steps below "until", and waits until "wanted" steps are done.

        Raises:
          UserError: a worker was started with other settings than the chief.
        """
        self._raise_refusal()
        # Under the lock: otherwise a step that turns out bad in between would not stop the others.
        with self._results.lock:
            if self._results.bad_step is None:
                self._steps.admission.run_to(message["until"])
        reached = self._steps.admission.wait(message["wanted"], PATIENCE_SECONDS)
        self._raise_refusal()
        workers = range(self._num_workers)
        reply = {
            "reached": reached,
            "done": self._steps.admission.done,
            "missing": self._steps.admission.missing(workers),
            "absent": self._presence.absent(workers),
            "bad_step": self._results.bad_step,
        }
        return reply, ()

    def pause(self, message: Message, arrays) -> Content:
        """Request of the chief, before it reads values: no worker begins a step, and steps in progress end."""
        idle = self._steps.admission.pause(PATIENCE_SECONDS)
        missing = self._steps.admission.missing(range(self._num_workers))
        positions = self._steps.positions()
        with self._results.lock:
            return {"idle": idle, "missing": missing, "positions": positions, **self._so_far()}, ()

    def _so_far(self) -> dict:
        """The progress since the chief's start, and the decisions that other servers need before they are read.

        The caller holds the lock.
        """
        return {
            "done": self._steps.admission.done,
            "totals": self._results.tally.totals(),
            "decided": self._steps.decided(),
        }

    def report(self, message: Message, arrays) -> Content:
        """The figures of the steps since the last report."""
        turned_away = self._steps.turned_away
        with self._results.lock:
            figures = {**self._so_far(), **self._results.tally.take()}
        return {**figures, "turned_away": turned_away, "stop_asked": self._stop_asked}, ()

    def get_state(self, message: Message, arrays) -> Content:
        with self._results.lock:
            return {}, [self._results.state.read()]

    def end(self, message: Message, arrays) -> Content:
        """Request of the chief: ends the run. Workers learn how it ended from the reply to their next `begin`."""
        self._end = message["how"]
        if self._steps.admission is not None:
            self._steps.admission.end()
        self._ready.set()
        return {}, ()

    def join(self, message: Message, arrays) -> Content:
        """Request of a worker before its first step, with its settings. Reply "again": it must repeat the request.

        A worker with other settings than the chief ends the run, unless it was restarted during the run: then the
        others continue.

        Raises:
          UserError: this worker, or another one, was started with other settings.
        """
        worker = message["worker"]
        if not self._ready.wait(PATIENCE_SECONDS):
            return {"again": True}, ()
        self._raise_refusal()
        # There are no settings if the run ended before its start.
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
        """Request of a worker for its next step.

        The reply holds the step, the state, this server's piece of the parameters and, for asynchronous steps, the
        decisions that the other servers must know before the worker pulls; or how the run ended; or "again": the
        worker must repeat the request. "settled" is the end of the decisions that the worker has passed on;
        "frozen_of" is the number of the chief's start that set the frozen weights which it needs.
        """
        worker = message["worker"]
        self._note_return(worker)
        self._stop_asked = self._stop_asked or message["stop_asked"]
        if not self._ready.wait(PATIENCE_SECONDS):
            return {"again": True}, ()
        admitted = None
        if self._refusal is None and self._end is None:
            connection = message.get("connection")
            admitted = self._steps.admission.begin(
                worker, PATIENCE_SECONDS, is_lost=lambda: not self._presence.asks_by(worker, connection)
            )
        # The refusal may have come while this worker waited for its step.
        self._raise_refusal()
        if admitted is None:
            return ({"end": self._end} if self._end is not None else {"again": True}), ()
        ticket = self._steps.granted(admitted)
        # All under one lock, so that the other servers' pieces are at least as new as this one.
        with self._results.lock:
            self._steps.settled(message["settled"])
            state, decided = self._results.state.read(), self._steps.decided()
            pulled, (piece,) = self._store.pull({"key": KEY}, ())
            frozen_of = self._starts if self._frozen else None
        ticket |= {"decided": decided, "frozen_of": frozen_of}
        return {"step": admitted.step, **ticket, **pulled}, [state, piece]

    def frozen(self, message: Message, arrays) -> Content:
        """The frozen weights, and in "frozen_of" the start that set them."""
        with self._results.lock:
            return {"frozen_of": self._starts}, self._frozen

    def _note_return(self, worker: int) -> None:
        if self._presence.returned(worker):
            log.warning("worker:%d is back: it computes its %s again", worker, self._steps.done_by_each)

    def connected(self, worker: int, connection: int) -> None:
        """Records that the worker asks by this connection from now on, until it is lost."""
        self._presence.connect(worker, connection)

    def lost(self, worker: int) -> None:
        """Counts a worker whose connection broke as lost."""
        was_replaced = self._presence.leave(worker)
        if self._end is None and self._steps.admission is not None:
            if not was_replaced:
                self._results.tally.add_failure(f"worker:{worker}")
            with self._results.lock:
                self._steps.admission.lost(worker)

    def overdue(self) -> set[int]:
        """Workers that held a step, or requested none, for longer than the timeout; others must do their work."""
        waits = self._end is None and self._steps.admission is not None
        return self._steps.admission.overdue(self._timeout_seconds) if waits else set()

    def admit(self, message: Message, arrays) -> Content:
        """For synchronous steps: whether the round accepts the gradient of a worker's lease."""
        return {"wanted": self._steps.admission.admit(message["lease"])}, ()

    def finish(self, message: Message, arrays) -> Content:
        """Request of a worker with server 0's piece of its gradient; the other servers have theirs."""
        change, *gradient = arrays
        self._steps.finish(message, change, gradient)
        return {}, ()

    def close(self) -> None:
        self._steps.close()
