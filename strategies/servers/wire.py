"""Messages between processes: a JSON object and some arrays on one TCP connection, requests and replies in turn.

    4 bytes magic, 4 bytes length | JSON, whose '' entry holds the arrays' dtypes and shapes | the arrays' bytes

A message has only numbers and names: nothing that arrives is executed. Until the other side is let in, it is a
stranger, with limits on bytes and time.

gRPC for Python (1.85) as the carrier was tried: with two workers, one server and the smallest network 0.68 (unary
calls) and 0.72 (a stream) times our updates a second, with ResNet-20 1.03 and 0.96 (Zen 3, quiet); the condition
was 0.8. Its server has one limit for all messages, so 400 MiB from a stranger took 1.3 GiB, and 200 silent
sessions filled the 64 threads that members need.
"""

import contextlib
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from strategies.errors import PeerLost
from strategies.keepalive import is_closed, is_unanswered, keep_alive
from towers.errors import UserError

Message = dict[str, object]
# The fields and the arrays of a request or a reply.
Content = tuple[Mapping[str, object], Sequence[np.ndarray]]
# Function of a request's fields and arrays that returns the reply.
Handler = Callable[[Message, Sequence[np.ndarray]], Content]

_PREFIX = struct.Struct("<4sI")
# The first bytes of every message, and so of every connection.
MAGIC = b"TOW1"
# The longest JSON text of a stranger, which sends its settings and no arrays, and of a member.
_STRANGERS_TEXT, _LONGEST_TEXT = 16 * 1024, 4 * 2**20
_DEEPEST_TEXT = 32
_ARRAYS = ""
_BUFFER_BYTES = 64 * 1024
# Up to this size, copying into one buffer is cheaper than another system call.
_JOINED_BYTES = 256 * 1024
# All dtypes of Keras's variables except text: a frozen weight is sent unchanged.
_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_FLOATS = ["float16", "float32", "float64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
_DTYPES = {dtype.name: dtype for dtype in map(np.dtype, ["bool", *_INTEGERS, *_FLOATS, "complex64", "complex128"])}
# Python's errors for JSON that is not a message; for a number that is too large, OverflowError.
_UNREADABLE = ValueError, TypeError, KeyError, AttributeError, OverflowError, MemoryError, RecursionError
# A socket's timeout of 0 means not to wait at all.
_LEAST_SECONDS = 0.001


class Refused(RuntimeError):
    """The other side understood the request and refused it."""


class RunEnded(Exception):
    """Raised instead of a reply if the other side has ended with the run.

    Attributes:
      how: how the run ended, 'done' or 'interrupted'.
    """

    def __init__(self, how: str):
        super().__init__(f"the run has ended: {how}")
        self.how = how


class Connection:
    """One end of a connection; used by one thread at a time. The other side is a stranger until `let_in`.

    Attributes:
      sent_bytes: bytes sent so far.
      received_bytes: bytes received so far.
    """

    def __init__(self, connected: socket.socket, introduction_seconds: float):
        """Args:
        connected: a connected socket; this object closes it.
        introduction_seconds: seconds until the other side must be let in.
        """
        self._socket = connected
        self._socket.settimeout(introduction_seconds)
        self._deadline: float | None = time.monotonic() + introduction_seconds
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connected)
        self.sent_bytes = self.received_bytes = 0
        self._closing = threading.Lock()
        # Buffer to read ahead, so that most messages need one system call.
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._read = self._filled = 0

    def let_in(self, timeout_seconds: float | None) -> None:
        """Marks the other side as a member, no longer a stranger.

        Args:
          timeout_seconds: seconds that it may be silent in the middle of an exchange; None for no limit.
        """
        self._deadline = None
        self._socket.settimeout(timeout_seconds)

    @property
    def timeout_seconds(self) -> float | None:
        """Seconds that the other side may be silent; None for no limit."""
        return self._socket.gettimeout()

    def send(self, message: Mapping[str, object], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends one message.

        Raises:
          OSError: the connection is broken, or the other side does not read.
        """
        self.send_all([(message, arrays)])

    def send_all(self, contents: Sequence[Content]) -> None:
        """Sends several messages, one after the other; raises as `send`."""
        parts = [part for message, arrays in contents for part in _parts(message, arrays)]
        size = sum(map(len, parts))
        if size <= _JOINED_BYTES:
            self._socket.sendall(b"".join(parts))
        else:
            for part in parts:
                self._send_part(memoryview(part))
        self.sent_bytes += size

    def _send_part(self, view: memoryview) -> None:
        """Sends bytes with the timeout for each wait, like `_fill`; `sendall` has one for all waits."""
        while view:
            view = view[self._socket.send(view) :]

    def receive(self) -> tuple[Message, list[np.ndarray]]:
        """The next message.

        Raises:
          OSError: the connection is broken or closed, or what arrived is not a message of this format.
        """
        is_stranger = self._deadline is not None
        magic, length = _PREFIX.unpack(self._bytes(_PREFIX.size))
        if magic != MAGIC or length > (_STRANGERS_TEXT if is_stranger else _LONGEST_TEXT):
            raise _foreign()
        text = self._bytes(length)
        try:
            message = _parsed(text)
            described = [(tuple(shape), _DTYPES[name]) for name, shape in message.pop(_ARRAYS)]
            if is_stranger and any(math.prod(shape) for shape, _ in described):
                raise ValueError("arrays of a process that is not let in")
            arrays = [np.empty(shape, dtype) for shape, dtype in described]
        except _UNREADABLE as error:
            raise _foreign(error) from error
        for array in arrays:
            if array.size:
                self._fill(memoryview(array.reshape(-1).view(np.uint8)))
        self.received_bytes += _PREFIX.size + length + sum(array.nbytes for array in arrays)
        return message, arrays

    def ask(self, message: Mapping[str, object], arrays: Sequence[np.ndarray] = ()):
        """Sends a request and returns the reply.

        Raises:
          UserError, Refused, PeerLost: the other side raised it.
          RunEnded: the other side has ended with the run.
          OSError: as `send` and `receive`.
        """
        self.send(message, arrays)
        return self.answer()

    def answer(self) -> tuple[Message, list[np.ndarray]]:
        """The reply to a request that was sent; raises as `ask`."""
        message, arrays = self.receive()
        if "user_error" in message:
            raise UserError(message["user_error"])
        if "refused" in message:
            raise Refused(message["refused"])
        if "peer_lost" in message:
            raise PeerLost(message["peer_lost"])
        if "run_ended" in message:
            raise RunEnded(message["run_ended"])
        return message, arrays

    @property
    def has_more(self) -> bool:
        """Whether bytes of another message were already read; False does not mean that none will arrive."""
        return self._read < self._filled

    def check(self) -> None:
        """Raises ConnectionError if either side has closed the connection, even if unread bytes remain."""
        if self._socket.fileno() < 0 or is_closed(self._socket):
            raise ConnectionError("the connection was closed")

    def is_unanswered(self) -> bool:
        """Whether the other machine has vanished while bytes were sent to it; any thread may call it."""
        with self._closing, contextlib.suppress(OSError):
            return is_unanswered(self._socket)
        return False

    def end(self) -> None:
        """Ends the connection from another thread. The thread that uses it gets an OSError, and closes it.

        It does not close the socket: the next connection would get the socket's number, and the other thread might
        wait on that one.
        """
        # The shutdown fails if either side has closed already.
        with self._closing, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end_reading(self) -> None:
        """As `end`, but the thread that uses the connection may still send."""
        with self._closing, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Ends and closes the connection; for the thread that uses it."""
        self.end()
        with self._closing:
            self._socket.close()

    def _bytes(self, count: int) -> bytearray:
        found = bytearray(count)
        self._fill(memoryview(found))
        return found

    def _fill(self, view: memoryview) -> None:
        while view:
            if self._read < self._filled:
                count = min(len(view), self._filled - self._read)
                view[:count] = self._buffer[self._read : self._read + count]
                self._read += count
            elif len(view) >= _BUFFER_BYTES:
                count = self._received_into(view)
            else:
                self._read, self._filled, count = 0, self._received_into(self._buffer), 0
            view = view[count:]

    def _received_into(self, view: memoryview) -> int:
        if self._deadline is not None:
            # A stranger's deadline is for all that it sends: single bytes now and then must not extend it.
            self._socket.settimeout(max(_LEAST_SECONDS, self._deadline - time.monotonic()))
        count = self._socket.recv_into(view)
        if count == 0:
            raise ConnectionError("the connection was closed")
        return count


def _foreign(why: Exception | None = None) -> ConnectionError:
    because = "" if why is None else f" ({why})"
    return ConnectionError(f"the other side sent something that is not a message of this program{because}")


def _parsed(text: bytes) -> Message:
    """The JSON of a message.

    Raises:
      ValueError, RecursionError: it is not JSON, or is nested deeper than any message of this program.
    """
    message = json.loads(text)
    # With few brackets the nesting cannot be too deep.
    level, depth = [message] if text.count(b"[") + text.count(b"{") > _DEEPEST_TEXT else [], 0
    while level:
        depth += 1
        if depth > _DEEPEST_TEXT:
            raise ValueError(f"JSON that is nested deeper than {_DEEPEST_TEXT}")
        level = [child for parent in level if isinstance(parent, (dict, list)) for child in _children(parent)]
    return message


def _children(parent: dict | list) -> Iterable:
    return parent.values() if isinstance(parent, dict) else parent


def _parts(message: Mapping[str, object], arrays: Sequence[np.ndarray]) -> list[bytes | memoryview]:
    """The bytes of one message, in parts."""
    arrays = [np.asarray(array, order="C") for array in arrays]
    described = [(array.dtype.name, array.shape) for array in arrays]
    text = json.dumps({**message, _ARRAYS: described}).encode()
    contents = [memoryview(array.reshape(-1).view(np.uint8)) for array in arrays if array.size]
    return [_PREFIX.pack(MAGIC, len(text)), text, *contents]
