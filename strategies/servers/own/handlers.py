"""The requests that every server answers: for its keys and values, and for its piece of a synchronous step."""

import functools
import threading
from collections.abc import Mapping

import numpy as np

from strategies.servers.own.rows import SplitGradient
from strategies.servers.own.steps.decisions import Decisions
from strategies.servers.own.steps.held_gradients import HeldGradients
from strategies.servers.own.steps.piece_gradient import PieceGradient
from strategies.servers.own.steps.staged_updates import StagedUpdates
from strategies.servers.own.store import Store, Vector
from strategies.servers.server_memory import free_bytes
from strategies.servers.wire import Content, Handler, Message
from towers.updates.clipping import Clipping
from towers.updates.rules import UpdateRule

# The key of the vector of all parameters.
KEY = "parameters"


class StoreHandlers:
    """One method for each request.

    Attributes:
      requests: the method that answers a request, by the request's name.
    """

    def __init__(self, rule: UpdateRule, clipping: Clipping, *, lazily: bool = False):
        """Args:
        rule, clipping: how gradients are applied.
        lazily: whether tables are updated lazily (`towers.updates.sparse_updates`).
        """
        self._lazily = lazily
        self._store, self._held, self._clipping = Store(rule), HeldGradients(), clipping
        self._about: dict[str, object] = {}
        self._count_lock, self._staged = threading.Lock(), StagedUpdates()
        self.pulls = self.pushes = 0
        self.requests: Mapping[str, Handler] = {
            "memory": self.memory,
            "init": self.init,
            "make": self.make,
            "read_part": self.read_part,
            "write_part": self.write_part,
            "restart": self.restart,
            "pull_rows": self.pull_rows,
            "keys": self.keys,
            "pull": self.pull,
            "push": self.push,
            "stage": self.stage,
            "settle": self.settle,
            "hold": self.hold,
            "square": self.square,
            "apply": self.apply,
        }

    def memory(self, message: Message, arrays) -> Content:
        return {"free_bytes": free_bytes()}, ()

    def init(self, message: Message, arrays) -> Content:
        """Creates a vector; "about" is a description by the clients, which `keys` returns."""
        value, *decays = arrays
        self._store.init(message["key"], value, *decays)
        self._about[message["key"]] = message.get("about")
        return {}, ()

    def make(self, message: Message, arrays) -> Content:
        """Creates zeros: a vector as long as the array, which tells where weight decay applies, and its tables."""
        (decays,) = arrays
        dtype = np.dtype(message["dtype"])
        self._store.init(message["key"], np.zeros(len(decays), dtype), decays)
        vector = self._store.vector(message["key"])
        for table in message["tables"]:
            vector.add_table(table["name"], table["shape"], decays=table["decays"], lazily=self._lazily)
        return {}, ()

    def read_part(self, message: Message, arrays) -> Content:
        """Elements "begin" to "end" of the vector, or rows of a table; or of the slot in "slot"."""
        vector = self._store.vector(message["key"])
        return {}, [vector.read_part(*(message[name] for name in ("table", "slot", "begin", "end")))]

    def write_part(self, message: Message, arrays) -> Content:
        """Sets what `read_part` reads. The parts of a vector must come in order; the last one assigns it."""
        (values,) = arrays
        vector = self._store.vector(message["key"])
        vector.write_part(*(message[name] for name in ("table", "slot", "begin")), values)
        return {}, ()

    def restart(self, message: Message, arrays) -> Content:
        """Call it when all parts are written: sets the version to "version", and drops staged updates."""
        self._staged = StagedUpdates()
        self._store.vector(message["key"]).version = message["version"]
        return {}, ()

    def pull_rows(self, message: Message, arrays) -> Content:
        """Rows of several matrices of tables, given their ids on this server."""
        ids = dict(zip(message["tables"], arrays, strict=True))
        return {}, self._store.vector(message["key"]).rows(ids)

    def keys(self, message: Message, arrays) -> Content:
        return {"about": dict(self._about)}, ()

    def pull(self, message: Message, arrays) -> Content:
        """This server's piece of a vector, after the updates in "decided", if given."""
        if message.get("decided") is not None:
            self.settle(message, ())
        value, version = self._store.vector(message["key"]).read()
        with self._count_lock:
            self.pulls += 1
        return {"version": version}, [value]

    def push(self, message: Message, arrays) -> Content:
        """Applies one update at once."""
        vector = self._store.vector(message["key"])
        gradient = _gradient(message, arrays, vector.dtype)
        since, aware = message.get("since"), message.get("aware", False)
        staleness = _applied(vector, gradient, message["rate"], since=since, aware=aware)
        self._count_push()
        return {"staleness": staleness}, ()

    def stage(self, message: Message, arrays) -> Content:
        """Holds an asynchronous gradient until server 0 decides on its lease: see `decisions`."""
        vector = self._store.vector(message["key"])
        gradient = _gradient(message, arrays, vector.dtype)
        vector.check(gradient.vector, gradient.rows)
        self._staged.stage(message["lease"], gradient)
        self._count_push()
        return {}, ()

    def settle(self, message: Message, arrays) -> Content:
        """Applies the updates that server 0 has decided on."""
        vector = self._store.vector(message["key"])
        self._staged.settle(Decisions(**message["decided"]), functools.partial(_applied, vector))
        return {}, ()

    def _count_push(self) -> None:
        with self._count_lock:
            self.pushes += 1

    def hold(self, message: Message, arrays) -> Content:
        """Holds a gradient SUM until `apply` averages it with those of other workers."""
        vector = self._store.vector(message["key"])
        gradient = _gradient(message, arrays, vector.dtype)
        self._held.hold(message["step"], message["lease"], gradient)
        self._count_push()
        return {}, ()

    def square(self, message: Message, arrays) -> Content:
        """The squared norm of this server's piece of the sum of these leases' gradients."""
        return {"square": self._held.total(message["step"], message["leases"]).square}, ()

    def apply(self, message: Message, arrays) -> Content:
        """One step's update from the held gradients: mean = SUM / weight, then clipping.

        The message's "weight" and "scale" are the step's total weight and the factor of global-norm clipping.
        """
        step = message["step"]
        if message["finite"]:
            vector = self._store.vector(message["key"])
            mean = self._held.mean(step, message["leases"], message["weight"])
            scale, bound = vector.dtype(message["scale"]), self._clipping.value
            mean = mean.map(lambda values: values * scale)
            if bound is not None:
                mean = mean.map(lambda values: np.clip(values, -bound, bound))
            _applied(vector, mean, message["rate"])
        self._held.drop(step)
        return {}, ()


def _gradient(message: Message, arrays, dtype) -> PieceGradient:
    """The gradient of a push: of the vector, which may contain rows of matrices, and of the tables."""
    of_vector = 1 + 2 * len(message["rows"])
    vector = SplitGradient.unpacked(message["rows"], arrays[:of_vector]).whole(dtype)
    return PieceGradient.unpacked(vector, arrays[of_vector:])


def _applied(vector: Vector, gradient: PieceGradient, rate: float, **named) -> int:
    return vector.apply(gradient.vector, rate, rows=gradient.rows, **named)
