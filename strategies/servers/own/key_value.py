"""Keys and values on parameter servers, without a training loop: init, pull, push.

    ps:0  |  rows 0 to 499 of "embedding"    |  "bias"  |
    ps:1  |  rows 500 to 999 of "embedding"  |  "scale" |

A value of 64 KiB or more is divided over the servers, between rows if the rows are short; a smaller value stays
whole. Both go to the servers that hold the least, so that all servers hold about the same number of bytes.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from strategies.servers.layout import row_width
from strategies.servers.own.connections.group import Group
from strategies.servers.own.rows import Rows, SplitGradient
from towers import gradients
from towers.errors import UserError
from towers.updates.rules import matrices_only

_WHOLE_BELOW_BYTES = 64 * 1024
_VALUE_DTYPES = ("float16", "float32", "float64")
_GRADIENT_DTYPES = (*_VALUE_DTYPES, "bfloat16")


def pieces_of(shape: Sequence[int], element_bytes: int, held_bytes: Sequence[int]) -> dict[int, slice]:
    """The piece of a new value for each server, in elements; servers without a piece are omitted.

    Args:
      shape: shape of the value.
      element_bytes: bytes of one element.
      held_bytes: bytes that each server holds already.
    """
    size = math.prod(shape)
    if size * element_bytes < _WHOLE_BELOW_BYTES:
        return {held_bytes.index(min(held_bytes)): slice(0, size)}
    width = row_width(shape)
    ends = np.cumsum(_levelling(held_bytes, size * element_bytes)) / (element_bytes * width)
    cuts = [0, *(round(end) * width for end in ends[:-1]), size]
    return {
        server: slice(begin, end)
        for server, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False))
        if begin < end
    }


def _levelling(held: Sequence[int], more: int) -> list[float]:
    """How `more` is divided so that all servers that get a part of it hold equal amounts afterwards."""
    ascending = sorted(held)
    levels = [(sum(ascending[:count]) + more) / count for count in range(1, len(held) + 1)]
    return [max(0.0, min(levels) - own) for own in held]


@dataclasses.dataclass(frozen=True)
class _Value:
    """Where a value lies on the servers.

    Attributes:
      shape: shape of the value.
      dtype: dtype of the value.
      pieces: each server's piece, in elements; the servers' order is the pieces' order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Mapping[int, slice]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_complete(self) -> bool:
        """Whether all its pieces are on the servers: False while another client still runs `init`."""
        return sum(piece.stop - piece.start for piece in self.pieces.values()) == self.size

    @property
    def described(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class KeyValueStore:
    """One client's view of the values on the servers of a group; used by one thread at a time.

    A server, in its own process:

        store = StoreHandlers(Momentum(), Clipping())
        Server(Member("ps", 0, "host:2222"), store, settings={}, secret="drawn").serve(startup_timeout_seconds=60)

    A client. One client must be a chief: the servers wait for it, and end if they lose it.

        servers = [Member("ps", 0, "host:2222"), Member("ps", 1, "host:2223")]
        times = {"startup_timeout_seconds": 60, "timeout_seconds": 60}
        group = Group.connected(servers, Member("chief", 0), settings={}, secret="drawn", **times)
        values = KeyValueStore(group)
        values.init("kernel", np.zeros([1000, 64], np.float32))
        values.push("kernel", gradient, rate=0.1)
        kernel = values.pull(["kernel"])["kernel"]
        group.ask_all("end", how="done")
        group.close()
    """

    def __init__(self, group: Group, *, decays: Callable[[str, tf.TensorShape], bool] = matrices_only):
        """Args:
        group: connections to the servers; this object does not close them.
        decays: whether the weight decay of the servers' rule applies to a key, given its name and shape; for keys
          that this client initialises.
        """
        self._group, self._decays = group, decays
        self._values: dict[str, _Value] = {}
        self._pulled: dict[str, Sequence[int]] = {}

    def init(self, key: str, value: np.ndarray) -> None:
        """Creates a new key for all clients; only one client calls it.

        Raises:
          UserError: the value is not an array of float16, float32 or float64, or the key exists.
          PeerLost: a server is lost or silent; `pull` and `push` raise it too.
        """
        value = np.asarray(value)
        if value.dtype.name not in _VALUE_DTYPES:
            raise UserError(
                f"init of {key!r}: servers hold no values of {value.dtype}; give one of {', '.join(_VALUE_DTYPES)}"
            )
        held_bytes = self._update_values()
        if key in self._values:
            there = self._values[key].described
            raise UserError(f"init of {key!r}: the key exists, with {there}; push to it or use another key")
        pieces = pieces_of(value.shape, value.itemsize, held_bytes)
        about = {"shape": value.shape, "dtype": value.dtype.name}
        decays = np.full(value.size, bool(self._decays(key, tf.TensorShape(value.shape))))
        requests = {
            server: (
                {"about": about | {"begin": piece.start, "end": piece.stop}},
                [value.reshape(-1)[piece], decays[piece]],
            )
            for server, piece in pieces.items()
        }
        self._group.ask_each("init", requests, key=key)
        self._values[key] = _Value(value.shape, value.dtype, pieces)

    def pull(self, keys: Sequence[str]) -> dict[str, np.ndarray]:
        """The values of some keys; each server's piece is consistent, never in the middle of an update.

        Raises:
          UserError: there is no such key.
        """
        return {key: self._pull(key, found) for key, found in [(key, self._find(key)) for key in keys]}

    def push(self, key: str, gradient: np.ndarray | tf.Tensor | tf.IndexedSlices, rate: float) -> int:
        """Applies one update by the servers' rule. Of a sparse gradient, each server gets only its rows.

        Args:
          key: the key whose value changes.
          gradient: has the value's shape, in float16, bfloat16, float32 or float64.
          rate: learning rate.

        Returns:
          The number of updates, including this client's, that a server had applied since this client last pulled
          the key: the maximum over the servers, or 0 if this client never pulled it.

        Raises:
          UserError: there is no such key, or the gradient has another shape or dtype than the value allows.
        """
        value = self._find(key)
        split = _split(key, gradient, value)
        versions = self._pulled.get(key) or [None] * len(value.pieces)
        requests = {}
        for (server, piece), since in zip(value.pieces.items(), versions, strict=True):
            rows, arrays = split.within(piece).packed()
            requests[server] = ({"rows": rows, "since": since}, arrays)
        replies = self._group.ask_each("push", requests, key=key, rate=float(rate))
        return max(reply["staleness"] for reply, _ in replies)

    def _pull(self, key: str, value: _Value) -> np.ndarray:
        replies = self._group.ask_each("pull", dict.fromkeys(value.pieces, ({}, ())), key=key)
        self._pulled[key] = [reply["version"] for reply, _ in replies]
        return np.concatenate([piece for _, (piece,) in replies]).reshape(value.shape)

    def _find(self, key: str) -> _Value:
        if key not in self._values:
            self._update_values()
        if key not in self._values:
            known = ", ".join(sorted(self._values)) or "none"
            raise UserError(f"there is no key {key!r} on the servers: init it first; the keys are: {known}")
        return self._values[key]

    def _update_values(self) -> list[int]:
        """Asks the servers for all keys; returns the bytes that each server holds."""
        found: dict[str, dict[int, dict]] = {}
        held_bytes = []
        for server, (reply, _) in enumerate(self._group.ask_all("keys")):
            # A vector that was not created by a KeyValueStore has no description.
            described = {key: about for key, about in reply["about"].items() if about is not None}
            for key, about in described.items():
                found.setdefault(key, {})[server] = about
            held_bytes.append(sum(_bytes_of(about) for about in described.values()))
        for key, by_server in found.items():
            about = next(iter(by_server.values()))
            pieces = {server: slice(own["begin"], own["end"]) for server, own in by_server.items()}
            value = _Value(tuple(about["shape"]), np.dtype(about["dtype"]), pieces)
            if value.is_complete:
                self._values[key] = value
        return held_bytes


def _bytes_of(about: Mapping) -> int:
    return (about["end"] - about["begin"]) * np.dtype(about["dtype"]).itemsize


def _split(key: str, gradient, value: _Value) -> SplitGradient:
    """The gradient of a value; raises UserError if it does not fit the value."""
    if isinstance(gradient, tf.IndexedSlices):
        return _split_rows(key, gradient, value)
    gradient = np.asarray(gradient)
    _check_gradient(key, gradient.dtype, gradient.shape, value)
    return SplitGradient(gradient.reshape(-1))


def _split_rows(key: str, gradient: tf.IndexedSlices, value: _Value) -> SplitGradient:
    gradient = gradients.merged(gradient)
    values, indices = gradient.values.numpy(), gradient.indices.numpy().astype(np.int64)
    height = value.shape[0] if value.shape else 0
    _check_gradient(key, values.dtype, (height, *values.shape[1:]), value)
    outside = indices[(indices < 0) | (indices >= height)]
    if outside.size:
        raise UserError(
            f"push of {key!r}: row {outside[0]} is outside {value.described}; give rows from 0 to {height - 1}"
        )
    width = math.prod(value.shape[1:])
    rows = Rows(0, height, width, indices, values.reshape(len(indices), width))
    split = SplitGradient(np.zeros(0, values.dtype), [rows])
    between_rows = width > 0 and all(piece.start % width == 0 for piece in value.pieces.values())
    return split if between_rows else SplitGradient(split.whole(values.dtype))


def _check_gradient(key: str, dtype: np.dtype, shape: Sequence[int], value: _Value) -> None:
    if dtype.name not in _GRADIENT_DTYPES:
        allowed = ", ".join(_GRADIENT_DTYPES)
        raise UserError(f"push of {key!r}: a gradient of {dtype} can't be sent; give one of {allowed}")
    if tuple(shape) != value.shape:
        raise UserError(
            f"push of {key!r}: the gradient has shape {list(shape)} and the value is {value.described}; "
            "give a gradient of the value's shape"
        )
