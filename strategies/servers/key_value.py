"""Keys and values on parameter servers, with nothing else around them: init, pull, push.

    ps:0  |  rows 0 to 499 of "embedding"    |  "bias"  |
    ps:1  |  rows 500 to 999 of "embedding"  |  "scale" |

A value of 64 KiB or more is divided over the servers, between rows where these are short; a smaller one is kept
whole. Either goes to where the least is kept, so that the servers stay level.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from strategies.servers.group import Group
from strategies.servers.layout import row_width
from strategies.servers.rows import Rows, SplitGradient
from towers import gradients
from towers.errors import UserError
from towers.updates.rules import matrices_only

_WHOLE_BELOW_BYTES = 64 * 1024
_VALUE_DTYPES = ("float16", "float32", "float64")
_GRADIENT_DTYPES = (*_VALUE_DTYPES, "bfloat16")


def pieces_of(shape: Sequence[int], bytes_each: int, kept_bytes: Sequence[int]) -> dict[int, slice]:
    """What each server is to keep of a new value, in elements; a server that keeps nothing of it is left out.

    Args:
      shape: of the value.
      bytes_each: of one element.
      kept_bytes: what each server keeps already.
    """
    size = math.prod(shape)
    if size * bytes_each < _WHOLE_BELOW_BYTES:
        return {kept_bytes.index(min(kept_bytes)): slice(0, size)}
    width = row_width(shape)
    ends = np.cumsum(_levelling(kept_bytes, size * bytes_each)) / (bytes_each * width)
    cuts = [0, *(round(end) * width for end in ends[:-1]), size]
    return {
        server: slice(begin, end)
        for server, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False))
        if begin < end
    }


def _levelling(kept: Sequence[int], more: int) -> list[float]:
    """How `more` is divided so that what the least full have becomes the same."""
    ascending = sorted(kept)
    levels = [(sum(ascending[:count]) + more) / count for count in range(1, len(kept) + 1)]
    return [max(0.0, min(levels) - own) for own in kept]


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A value on the servers.

    Attributes:
      shape, dtype: its own.
      pieces: of its elements in order, by server.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Mapping[int, slice]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_complete(self) -> bool:
        """Not while somebody is still at its init."""
        return sum(piece.stop - piece.start for piece in self.pieces.values()) == self.size

    @property
    def described(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class KeyValueStore:
    """One client's view of what the servers of a group keep; used by one thread at a time.

    A server, in a process of its own:

        store = StoreHandlers(Momentum(), Clipping())
        Server(Member("ps", 0, "host:2222"), store, settings={}, secret="").serve(startup_timeout_seconds=60)

    A client, the first one a chief, for which servers wait and whose loss ends them:

        servers = [Member("ps", 0, "host:2222"), Member("ps", 1, "host:2223")]
        times = {"startup_timeout_seconds": 60, "timeout_seconds": 60}
        group = Group.connected(servers, Member("chief", 0), settings={}, secret="", **times)
        values = KeyValueStore(group)
        values.init("kernel", np.zeros([1000, 64], np.float32))
        values.push("kernel", gradient, rate=0.1)
        kernel = values.pull(["kernel"])["kernel"]
        group.ask_all("end", how="done")
        group.close()
    """

    def __init__(self, group: Group, *, decays: Callable[[str, tf.TensorShape], bool] = matrices_only):
        """Args:
        group: connections to the servers; they are not closed here.
        decays: whether the weight decay of the servers' rule is for a key that is initialised here.
        """
        self._group, self._decays = group, decays
        self._kept: dict[str, _Kept] = {}
        self._pulled: dict[str, Sequence[int]] = {}

    def init(self, key: str, value: np.ndarray) -> None:
        """A new key for all clients; one of them does it.

        Raises:
          UserError: the value is no array of float16, float32 or float64, or there is such a key.
          PeerLost: a server is gone or silent, as in all that follows.
        """
        value = np.asarray(value)
        if value.dtype.name not in _VALUE_DTYPES:
            raise UserError(f"init of {key!r}: {value.dtype} is not kept; give one of {', '.join(_VALUE_DTYPES)}")
        kept_bytes = self._learn()
        if key in self._kept:
            there = self._kept[key].described
            raise UserError(f"init of {key!r}: there is one, {there}; push to it, or take another key")
        pieces = pieces_of(value.shape, value.itemsize, kept_bytes)
        about = {"shape": value.shape, "dtype": value.dtype.name}
        decays = np.full(value.size, bool(self._decays(key, tf.TensorShape(value.shape))))
        questions = {
            server: (
                {"about": about | {"begin": piece.start, "end": piece.stop}},
                [value.reshape(-1)[piece], decays[piece]],
            )
            for server, piece in pieces.items()
        }
        self._group.ask_each("init", questions, key=key)
        self._kept[key] = _Kept(value.shape, value.dtype, pieces)

    def pull(self, keys: Sequence[str]) -> dict[str, np.ndarray]:
        """The values of some keys; each server's piece is as it is between two updates.

        Raises:
          UserError: nothing is kept under one of them.
        """
        return {key: self._value(key, kept) for key, kept in [(key, self._find(key)) for key in keys]}

    def push(self, key: str, gradient: np.ndarray | tf.Tensor | tf.IndexedSlices, rate: float) -> int:
        """One update by the servers' rule; all of them make it, of sparse gradients each is sent its rows alone.

        Args:
          key: whose value changes.
          gradient: of the value's shape, in float16, bfloat16, float32 or float64.
          rate: learning rate.

        Returns:
          How many updates, this client's included, a server had made since this client last pulled the key;
          the largest of all servers', and 0 if it never pulled.

        Raises:
          UserError: nothing is kept under the key, or the gradient is not one of its value.
        """
        kept = self._find(key)
        split = _split(key, gradient, kept)
        versions = self._pulled.get(key) or [None] * len(kept.pieces)
        questions = {}
        for (server, piece), since in zip(kept.pieces.items(), versions, strict=True):
            rows, arrays = split.within(piece).packed()
            questions[server] = ({"rows": rows, "since": since}, arrays)
        answers = self._group.ask_each("push", questions, key=key, rate=float(rate))
        return max(answer["staleness"] for answer, _ in answers)

    def _value(self, key: str, kept: _Kept) -> np.ndarray:
        answers = self._group.ask_each("pull", dict.fromkeys(kept.pieces, ({}, ())), key=key)
        self._pulled[key] = [told["version"] for told, _ in answers]
        return np.concatenate([piece for _, (piece,) in answers]).reshape(kept.shape)

    def _find(self, key: str) -> _Kept:
        if key not in self._kept:
            self._learn()
        if key not in self._kept:
            named = ", ".join(sorted(self._kept)) or "nothing"
            raise UserError(f"key {key!r}: nothing is kept under it; init it first, there is {named}")
        return self._kept[key]

    def _learn(self) -> list[int]:
        """Asks the servers for all keys; the bytes that each keeps."""
        found: dict[str, dict[int, dict]] = {}
        kept_bytes = []
        for server, (told, _) in enumerate(self._group.ask_all("keys")):
            # What was not initialised by one like this is described to nobody.
            described = {key: about for key, about in told["about"].items() if about is not None}
            for key, about in described.items():
                found.setdefault(key, {})[server] = about
            kept_bytes.append(sum(_bytes_of(about) for about in described.values()))
        for key, by_server in found.items():
            about = next(iter(by_server.values()))
            pieces = {server: slice(own["begin"], own["end"]) for server, own in by_server.items()}
            kept = _Kept(tuple(about["shape"]), np.dtype(about["dtype"]), pieces)
            if kept.is_complete:
                self._kept[key] = kept
        return kept_bytes


def _bytes_of(about: Mapping) -> int:
    return (about["end"] - about["begin"]) * np.dtype(about["dtype"]).itemsize


def _split(key: str, gradient, kept: _Kept) -> SplitGradient:
    """The gradient of a value, checked; raises UserError."""
    if isinstance(gradient, tf.IndexedSlices):
        return _split_rows(key, gradient, kept)
    gradient = np.asarray(gradient)
    _check_gradient(key, gradient.dtype, gradient.shape, kept)
    return SplitGradient(gradient.reshape(-1))


def _split_rows(key: str, gradient: tf.IndexedSlices, kept: _Kept) -> SplitGradient:
    gradient = gradients.merged(gradient)
    values, indices = gradient.values.numpy(), gradient.indices.numpy().astype(np.int64)
    height = kept.shape[0] if kept.shape else 0
    _check_gradient(key, values.dtype, (height, *values.shape[1:]), kept)
    outside = indices[(indices < 0) | (indices >= height)]
    if outside.size:
        raise UserError(f"push of {key!r}: row {outside[0]} of {kept.described}; its rows are 0 to {height - 1}")
    width = math.prod(kept.shape[1:])
    rows = Rows(0, height, width, indices, values.reshape(len(indices), width))
    split = SplitGradient(np.zeros(0, values.dtype), [rows])
    between_rows = width > 0 and all(piece.start % width == 0 for piece in kept.pieces.values())
    return split if between_rows else SplitGradient(split.whole(values.dtype))


def _check_gradient(key: str, dtype: np.dtype, shape: Sequence[int], kept: _Kept) -> None:
    if dtype.name not in _GRADIENT_DTYPES:
        allowed = ", ".join(_GRADIENT_DTYPES)
        raise UserError(f"push of {key!r}: a gradient of {dtype} is not sent; give one of {allowed}")
    if tuple(shape) != kept.shape:
        raise UserError(
            f"push of {key!r}: a gradient {list(shape)} for {kept.described}; give one of the value's shape"
        )
