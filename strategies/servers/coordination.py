"""What server 0 answers beyond the others: who computes next, what a step came to, how the run ends."""

import math
import threading
from collections.abc import Callable, Sequence

import numpy as np

from strategies.servers.admission import Admission, Ticket
from strategies.servers.group import Group
from strategies.servers.handlers import StoreHandlers
from strategies.servers.options import ServersOptions
from strategies.servers.rounds import Rounds
from strategies.servers.tally import Tally
from strategies.servers.wire import Content, Message
from towers.updates.clipping import Clipping

# How long a worker's question is kept before it is told to ask again: it notices a lost server meanwhile.
PATIENCE_SECONDS = 2.0
KEY = "parameters"


class Coordination:
    """One method a question; its name is the question's. State (batch statistics) is small and kept here whole."""

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
        options: of the group.
        clipping: of averaged gradients.
        store: this server's own vectors.
        num_workers: how many take part.
        stops_if_bad: whether no step is begun after one that was not finite.
        connect_others: makes connections to the other servers.
        """
        self._options, self._clipping, self._store = options, clipping, store
        self._num_workers, self._connect_others = num_workers, connect_others
        self._stops_if_bad = stops_if_bad
        self._others = Group((), ())
        self._state, self._averaged = np.zeros(0), np.zeros(0, bool)
        self._state_lock = threading.Lock()
        self._admission: Admission | Rounds | None = None
        self._ready = threading.Event()
        self._parts: dict[int, tuple[Message, np.ndarray]] = {}
        self._present: set[int] = set()
        self._tally = Tally()
        self._bad_step: int | None = None
        self._stop_asked = False
        self._end: str | None = None

    def start(self, message: Message, arrays) -> Content:
        """The chief has set all vectors: workers may ask for steps from message['step'] on."""
        first, options = message["step"], self._options
        self._state, self._averaged = arrays
        if options.is_sync:
            self._admission = Rounds(first, needed=self._num_workers - options.backup_workers)
            if not self._others.connections:
                self._others = self._connect_others()
        else:
            self._admission = Admission(first, bound=options.bound, num_workers=self._num_workers)
        self._bad_step, self._tally = None, Tally()
        self._ready.set()
        return {}, ()

    def run_to(self, message: Message, arrays) -> Content:
        """The chief lets all work up to a step, and asks again and again whether so many are done."""
        if self._bad_step is None:
            self._admission.run_to(message["until"])
        reached = self._admission.wait(message["wanted"], PATIENCE_SECONDS)
        everyone = range(self._num_workers)
        told = {
            "reached": reached,
            "done": self._admission.done,
            "missing": self._admission.missing(everyone),
            "absent": sorted(set(everyone) - self._present),
            "bad_step": self._bad_step,
        }
        return told, ()

    def pause(self, message: Message, arrays) -> Content:
        """The chief wants to look at everything: nobody begins a step, and those that were begun end."""
        idle = self._admission.pause(PATIENCE_SECONDS)
        missing = self._admission.missing(range(self._num_workers))
        return {"idle": idle, "missing": missing, **self._so_far()}, ()

    def _so_far(self) -> dict:
        with self._state_lock:
            return {"done": self._admission.done, "totals": self._tally.totals()}

    def report(self, message: Message, arrays) -> Content:
        turned_away = self._admission.turned_away if self._options.is_sync else 0
        with self._state_lock:
            told = {"done": self._admission.done, "totals": self._tally.totals(), **self._tally.take()}
        return {**told, "turned_away": turned_away, "stop_asked": self._stop_asked}, ()

    def get_state(self, message: Message, arrays) -> Content:
        with self._state_lock:
            return {}, [self._state.copy()]

    def end(self, message: Message, arrays) -> Content:
        """The chief ends the run; workers are told how when they ask next."""
        self._end = message["how"]
        if self._admission is not None:
            self._admission.end()
        self._ready.set()
        return {}, ()

    def begin(self, message: Message, arrays) -> Content:
        """A worker's next step, with the state and this server's piece; or how the run ended; or to ask again."""
        worker = message["worker"]
        self._present.add(worker)
        self._stop_asked = self._stop_asked or message["stop_asked"]
        if not self._ready.wait(PATIENCE_SECONDS):
            return {"again": True}, ()
        if self._end is not None:
            return {"end": self._end}, ()
        given = self._admission.begin(worker, PATIENCE_SECONDS)
        if given is None:
            return ({"end": self._end} if self._end is not None else {"again": True}), ()
        number, done = (given, given) if self._options.is_sync else (given.number, given.done)
        with self._state_lock:
            state = self._state.copy()
        told, (piece,) = self._store.pull({"key": KEY}, ())
        return {"number": number, "done": done, **told}, [state, piece]

    def lost(self, worker: int) -> None:
        """A worker's connection broke before the run's end."""
        self._present.discard(worker)
        if self._end is None and self._admission is not None:
            self._tally.add_failure(f"worker:{worker}")
            self._admission.lost(worker)

    def overdue(self) -> set[int]:
        """Workers that have a step for too long, which others are to do."""
        waits = self._end is None and self._admission is not None
        return self._admission.overdue(self._options.timeout_seconds) if waits else set()

    def admit(self, message: Message, arrays) -> Content:
        """Synchronous: whether a worker's gradient is still wanted."""
        return {"wanted": self._admission.admit(message["worker"], message["number"])}, ()

    def finish(self, message: Message, arrays) -> Content:
        """A worker's gradient is with all other servers; the rest of it is here."""
        change, *gradient = arrays
        if self._options.is_sync:
            self._finish_part(message, change, gradient)
        else:
            self._finish_alone(message, change, gradient)
        return {}, ()

    def _finish_alone(self, message, change, gradient) -> None:
        number, finite = message["number"], message["finite"]
        told = message["told"]
        # In one: who is admitted by this gets the state, and then the parameters, only after the update; and a
        # report of so many steps has all their numbers.
        with self._state_lock:
            if not self._admission.use(Ticket(number, message["worker"], message["done"])):
                return
            largest = None
            if finite:
                staleness = self._store.push(message, gradient)[0]["staleness"]
                largest = max(staleness, *message["staleness_elsewhere"], 0)
                self._state += change
            self._note_bad(number, finite)
            self._tally.add_part(f"worker:{message['worker']}", told, largest)
            self._tally.add_step(told["sums"], told["norm"], finite=finite)

    def _finish_part(self, message, change, gradient) -> None:
        worker, number = message["worker"], message["number"]
        if not self._options.backup_workers:
            self._admission.admit(worker, number)
        self._store.hold(message, gradient)
        self._parts[worker] = message, change
        complete = self._admission.give(worker, number)
        if complete is not None:
            self._finish_round(number, complete)

    def _finish_round(self, number: int, workers: Sequence[int]) -> None:
        """Averages and applies, on all servers; one thread is here at a time, the round's last worker's."""
        parts = [self._parts.pop(worker) for worker in workers]
        weight = sum(message["weight"] for message, _ in parts)
        question = {"key": KEY, "number": number, "workers": list(workers)}
        squares = [answer["square"] for answer in self._ask_all("square", question)]
        norm = math.sqrt(sum(squares)) / weight if weight else 0.0
        finite = math.isfinite(norm) and all(message["finite"] for message, _ in parts)
        bound = self._clipping.global_norm
        scale = min(1.0, bound / norm) if bound is not None and norm > 0 else 1.0
        apply = {"finite": finite, "weight": weight, "scale": scale, "rate": parts[0][0]["rate"]}
        self._ask_all("apply", question | apply)
        # In one, as a step of `_finish_alone`.
        with self._state_lock:
            if finite and weight:
                # State that is not averaged changes by the first worker's change alone; the others send zeros.
                divisors = np.where(self._averaged, weight, 1.0)
                self._state += sum(change for _, change in parts) / divisors
            self._note_bad(number, finite)
            for message, _ in parts:
                self._tally.add_part(f"worker:{message['worker']}", message["told"])
            self._tally.add_step(_added(message["told"]["sums"] for message, _ in parts), norm, finite=finite)
            self._admission.applied()

    def _ask_all(self, what: str, question: dict) -> list[Message]:
        answers = self._others.asked_all(what, **question)
        own = getattr(self._store, what)(question, ())[0]
        return [own, *(answer for answer, _ in answers())]

    def _note_bad(self, number: int, finite: bool) -> None:
        if not finite and self._stops_if_bad and self._bad_step is None:
            self._bad_step = number
            self._admission.run_to(0)

    def close(self) -> None:
        self._others.close()


def _added(sums) -> dict[str, list[float]]:
    """Totals and weights of several parts."""
    total: dict[str, list[float]] = {}
    for of_part in sums:
        for name, pair in of_part.items():
            total[name] = [a + b for a, b in zip(total.get(name, (0.0, 0.0)), pair, strict=True)]
    return total
