"""The requests that every server answers: its keys and values, and its piece of a synchronous step."""

import contextlib
import threading

import numpy as np

from strategies.servers.held_gradients import HeldGradients
from strategies.servers.piece_gradient import PieceGradient
from strategies.servers.rows import SplitGradient
from strategies.servers.server_memory import free_bytes
from strategies.servers.store import Store, Vector
from strategies.servers.wire import Content, Message
from towers.updates.clipping import Clipping
from towers.updates.rules import UpdateRule

# Larger than the distance between the steps of any two workers.
_REMEMBERED_STEPS = 10_000


class StoreHandlers:
    """One method for each request, by the request's name."""

    def __init__(self, rule: UpdateRule, clipping: Clipping, *, lazily: bool = False):
        """Args:
        rule, clipping: how gradients are applied.
        lazily: whether tables are updated lazily (`towers.updates.sparse_updates`).
        """
        self._lazily = lazily
        self._store, self._held, self._clipping = Store(rule), HeldGradients(), clipping
        self._about: dict[str, object] = {}
        self._count_lock, self._step_lock = threading.Lock(), threading.Lock()
        self._applied: set[int] = set()
        self.pulls = self.pushes = 0

    def memory(self, message: Message, arrays) -> Content:
        return {"free_bytes": free_bytes()}, ()

    def init(self, message: Message, arrays) -> Content:
        """Makes a vector; "about" is the clients' description of it, returned by `keys`."""
        value, *decays = arrays
        self._store.init(message["key"], value, *decays)
        self._about[message["key"]] = message.get("about")
        return {}, ()

    def init_table(self, message: Message, arrays) -> Content:
        """Adds this server's rows of a matrix of tables to a vector."""
        (value,) = arrays
        vector = self._store.vector(message["key"])
        vector.add_table(message["table"], value, decays=message["decays"], lazily=self._lazily)
        return {}, ()

    def set_table(self, message: Message, arrays) -> Content:
        value, *slots = arrays
        named = dict(zip(message["names"], slots, strict=True))
        self._store.vector(message["key"]).set_table(message["table"], value, named)
        return {}, ()

    def get_table(self, message: Message, arrays) -> Content:
        """All rows of a matrix of tables, and its slots."""
        value, slots = self._store.vector(message["key"]).table(message["table"])
        return {"names": list(slots)}, [value, *slots.values()]

    def pull_rows(self, message: Message, arrays) -> Content:
        """Some rows of several matrices of tables, given their ids on this server."""
        ids = dict(zip(message["tables"], arrays, strict=True))
        return {}, self._store.vector(message["key"]).rows(ids)

    def keys(self, message: Message, arrays) -> Content:
        return {"about": dict(self._about)}, ()

    def pull(self, message: Message, arrays) -> Content:
        value, version = self._store.vector(message["key"]).read()
        with self._count_lock:
            self.pulls += 1
        return {"version": version}, [value]

    def push(self, message: Message, arrays) -> Content:
        """Applies one update at once.

        A step that was applied before is not applied again. A step comes twice if a worker dies after it pushed
        here and before server 0 counted the step: another worker then computes the step again.
        """
        step = message.get("step")
        with contextlib.nullcontext() if step is None else self._step_lock:
            if step in self._applied:
                return {"staleness": 0}, ()
            vector = self._store.vector(message["key"])
            gradient = _gradient(message, arrays, vector.dtype)
            since, aware = message.get("since"), message.get("aware", False)
            staleness = _applied(vector, gradient, message["rate"], since=since, aware=aware)
            # After the update: one that was refused or failed must be possible again.
            self._remember(step)
        with self._count_lock:
            self.pushes += 1
        return {"staleness": staleness}, ()

    def _remember(self, step: int | None) -> None:
        """Remembers that the step is applied, and forgets much earlier ones."""
        if step is not None:
            self._applied.add(step)
        if len(self._applied) > 2 * _REMEMBERED_STEPS:
            self._applied = set(sorted(self._applied)[_REMEMBERED_STEPS:])

    def get_slots(self, message: Message, arrays) -> Content:
        slots = self._store.vector(message["key"]).slots()
        return {"names": list(slots)}, list(slots.values())

    def set(self, message: Message, arrays) -> Content:
        self._applied.clear()
        value, *slots = arrays
        named = dict(zip(message["names"], slots, strict=True))
        self._store.vector(message["key"]).set(value, named, message["version"])
        return {}, ()

    def hold(self, message: Message, arrays) -> Content:
        """Holds a gradient SUM until `apply` averages it with those of other workers."""
        vector = self._store.vector(message["key"])
        gradient = _gradient(message, arrays, vector.dtype)
        self._held.hold(message["step"], message["worker"], gradient)
        with self._count_lock:
            self.pushes += 1
        return {}, ()

    def square(self, message: Message, arrays) -> Content:
        """The squared norm of this server's piece of the sum of these workers' gradients."""
        return {"square": self._held.total(message["step"], message["workers"]).square}, ()

    def apply(self, message: Message, arrays) -> Content:
        """One step's update from the held gradients: mean = SUM / weight, then clipping.

        The message's "weight" and "scale" are the step's whole weight and the factor of global-norm clipping.
        """
        step = message["step"]
        if message["finite"]:
            vector = self._store.vector(message["key"])
            mean = self._held.mean(step, message["workers"], message["weight"])
            scale, bound = vector.dtype(message["scale"]), self._clipping.value
            mean = mean.map(lambda values: values * scale)
            if bound is not None:
                mean = mean.map(lambda values: np.clip(values, -bound, bound))
            _applied(vector, mean, message["rate"])
        self._held.drop(step)
        return {}, ()


def _gradient(message: Message, arrays, dtype) -> PieceGradient:
    """The gradient of a push: that of the vector, which may hold rows of its own, and those of the tables."""
    of_vector = 1 + 2 * len(message["rows"])
    vector = SplitGradient.unpacked(message["rows"], arrays[:of_vector]).whole(dtype)
    return PieceGradient.unpacked(vector, arrays[of_vector:])


def _applied(vector: Vector, gradient: PieceGradient, rate: float, **named) -> int:
    return vector.apply(gradient.vector, rate, rows=gradient.rows, **named)
