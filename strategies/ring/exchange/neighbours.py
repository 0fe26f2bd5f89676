"""Frames of bytes from the previous worker of a ring and to the next one, each with a deadline.

A frame's head identifies its call and vector, so ranks that make different calls get an error:

    8 bytes number of the call, 4 checksum of its purpose, 4 checksum of its dtype, 8 length | the vector's bytes
"""

import contextlib
import queue
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from strategies.keepalive import is_closed, keep_alive

_SOCKET_BYTES = 4 * 2**20
# After this time without a byte, a worker checks whether the others are alive.
PATIENCE_SECONDS = 5.0
# Up to this size, copying behind the head is cheaper than another system call.
_JOINED_BYTES = 64 * 1024
HEAD = struct.Struct("<QIIQ")
# Added to the remaining time, because a socket's timeout of 0 means not to wait at all.
_LATE_SECONDS = 0.01


class OutOfStep(ConnectionError):
    """The previous worker makes a different call from this one."""


class NeighbourLost(ConnectionError):
    """The connection to a neighbour is closed.

    Attributes:
      steps: the neighbours whose connections are closed: -1 for the previous worker, 1 for the next one.
    """

    def __init__(self, why: str, step: int):
        super().__init__(why)
        self.steps = (step,)


class Neighbours:
    """The two connections of one worker. Everything is sent in the order of the calls and received in that order.

    The methods raise TimeoutError if the other workers do not send or do not read, and ConnectionError if one of
    them is lost.

    Attributes:
      rank, num_workers: index of this worker, and number of workers.
      failure: error of the last call that failed; None if none has.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        to_next: socket.socket,
        from_previous: socket.socket,
        *,
        timeout_seconds: float,
        check: Callable[[int], None],
    ):
        """Args:
        rank: index of this worker.
        num_workers: number of workers.
        to_next, from_previous: connected sockets; they may be the same one.
        timeout_seconds: seconds to wait for the others.
        check: called with a rank after some seconds without a byte; raises ConnectionError if that rank is lost.
        """
        self.rank, self.num_workers = rank, num_workers
        self._next, self._previous = to_next, from_previous
        self._timeout_seconds, self._check, self._num_silences = timeout_seconds, check, 0
        self.failure: OSError | None = None
        self._num_calls, self._purpose, self._checksum, self._num_unsent = 0, "", 0, 0
        for connection in (to_next, from_previous):
            prepare(connection)
        self._to_send: queue.SimpleQueue = queue.SimpleQueue()
        self._sent: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    @contextlib.contextmanager
    def call(self, purpose: str) -> Iterator[None]:
        """Context manager: one call, whose frames have a number and a purpose.

        Remembers an error, because TensorFlow, whose graph calls this, replaces it by one of its own.
        """
        self._num_calls += 1
        self._purpose, self._checksum = purpose, zlib.crc32(purpose.encode())
        try:
            yield
        except OSError as error:
            if isinstance(error, NeighbourLost):
                # When one worker ends, the others end soon after. It is unknown which was first, so both
                # neighbours are named.
                ends = {-1: self._previous, 1: self._next}
                error.steps = tuple(step for step in ends if step in error.steps or is_closed(ends[step]))
            self.failure = error
            raise

    def send(self, vector: np.ndarray) -> None:
        """Sends a frame, now or by the sending thread."""
        self.send_bytes(bytes_of(vector), self._head(vector))

    def send_bytes(self, view: memoryview, head: bytes) -> None:
        """Sends the head of a frame, if it is not empty, and bytes of its vector."""
        if len(view) > _JOINED_BYTES:
            self._give(head, view)
            return
        left = head + view
        if self._is_all_sent():
            # If the socket's buffer has room for it, no other thread needs to wake up.
            with contextlib.suppress(TimeoutError), _neighbour_lost(1):
                left = left[self._next.send(left) :]
        if left:
            self._give(left)

    def expect(self, vector: np.ndarray) -> bytes:
        """Receives the head of the frame of a vector, and returns it.

        Raises:
          OutOfStep: the frame is of another call, or of a vector of another length or dtype.
        """
        head, own = bytearray(HEAD.size), self._head(vector)
        self.receive(memoryview(head))
        if head != own:
            number, purpose, dtype, length = HEAD.unpack(head)
            own_number, own_purpose, own_dtype, own_length = HEAD.unpack(own)
            is_same = (purpose, dtype) == (own_purpose, own_dtype)
            what = "the same" if is_same else "another purpose or dtype"
            raise OutOfStep(
                f"its exchange {number} has {length} bytes and {what}, this worker's exchange {own_number} "
                f"({self._purpose}) {own_length} bytes"
            )
        return own

    def receive(self, view: memoryview) -> None:
        """Fills the view with bytes of the frame whose head was received last."""
        deadline = time.monotonic() + self._timeout_seconds
        while view:
            try:
                self._previous.settimeout(self._patience(deadline))
                with _neighbour_lost(-1):
                    count = self._previous.recv_into(view)
            except TimeoutError:
                self._check_after_silence(deadline, self.rank - 1, "no data")
                continue
            if count == 0:
                raise NeighbourLost("the previous worker closed the connection", -1)
            view = view[count:]

    def wait_until_sent(self) -> None:
        """Blocks until all vectors are sent and may be changed."""
        deadline = time.monotonic() + self._timeout_seconds
        while self._num_unsent:
            try:
                self._note_sent(self._sent.get(timeout=self._patience(deadline)))
            except queue.Empty:
                self._check_after_silence(deadline, self.rank + 1, "the next worker did not read")

    def _head(self, vector: np.ndarray) -> bytes:
        """The head of the frame of a vector in the current call."""
        dtype = zlib.crc32(vector.dtype.str.encode())
        return HEAD.pack(self._num_calls, self._checksum, dtype, vector.nbytes)

    def _give(self, *parts: bytes | memoryview) -> None:
        """Passes bytes to the sending thread."""
        self._num_unsent += 1
        self._to_send.put(parts)

    def _is_all_sent(self) -> bool:
        """Whether the sending thread has nothing to do."""
        while self._num_unsent and not self._sent.empty():
            self._note_sent(self._sent.get())
        return not self._num_unsent

    def _note_sent(self, problem: OSError | None) -> None:
        self._num_unsent -= 1
        if problem is not None:
            with _neighbour_lost(1):
                raise problem

    def _patience(self, deadline: float) -> float:
        """Seconds to wait before checking the other workers."""
        return min(PATIENCE_SECONDS, max(0.0, deadline - time.monotonic()) + _LATE_SECONDS)

    def _check_after_silence(self, deadline: float, neighbour: int, what: str) -> None:
        """Raises ConnectionError if another worker is lost, TimeoutError after the deadline.

        Checks the neighbour that it waits for and one other worker, in turn: if all checked all, the number of
        checks would grow with the square of the number of workers.
        """
        # If the sending thread found that the next worker is lost, nothing arrives around the ring.
        self._is_all_sent()
        self._num_silences += 1
        for rank in dict.fromkeys((neighbour % self.num_workers, self._num_silences % self.num_workers)):
            if rank != self.rank:
                self._check(rank)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} for {self._timeout_seconds:g} seconds")

    def _send_all(self) -> None:
        """Body of the sending thread. Sending must not wait for receiving, or all workers would deadlock."""
        while True:
            try:
                _send(self._next, self._to_send.get(), until=lambda: self.failure is not None)
                self._sent.put(None)
            except OSError as error:
                self._sent.put(error)
                return


@contextlib.contextmanager
def _neighbour_lost(step: int) -> Iterator[None]:
    """Context manager: turns a ConnectionError into a NeighbourLost."""
    try:
        yield
    except ConnectionError as error:
        raise NeighbourLost(str(error), step) from error


def prepare(connection: socket.socket) -> None:
    """Configures both ends of a connection: no delay, keepalive, large buffers, and a timeout."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, _SOCKET_BYTES)
    connection.settimeout(PATIENCE_SECONDS)


def _send(connection: socket.socket, parts: Sequence[bytes | memoryview], *, until: Callable[[], bool]) -> None:
    """Sends all bytes. The waiting thread has the deadline; `until` returns whether it has stopped waiting."""
    left = [memoryview(part) for part in parts if part]
    while left:
        try:
            sent = connection.sendmsg(left)
        except TimeoutError:
            if until():
                raise
            continue
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if left:
            left[0] = left[0][sent:]


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return memoryview(array.view(np.uint8))
