"""Collectives over TCP between the workers of a ring, for numbers in the host's memory.

TensorFlow's own ring sends through gRPC, which copies each byte several times; here bytes go from the array to the
socket and back. The algorithm is the usual one (Patarasu and Yuan 2009): the vector is cut into W chunks; in W - 1
rounds each chunk goes around the ring and is summed, in W - 1 more rounds the sums go around. With W = 3, each
rank sends:

    rank 0     chunk 0   chunk 2 | chunk 1   chunk 0
    rank 1     chunk 1   chunk 0 | chunk 2   chunk 1
    rank 2     chunk 2   chunk 1 | chunk 0   chunk 2
               partial sums      | complete sums

One rank computes the sum of a chunk and the others copy it, so all have the same bits.

It has its own deadlines and errors, because TensorFlow 2.21 may crash when one of its collectives times out.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from towers.split import boundaries, even_shares

# Sums are computed while more bytes arrive, in pieces that stay in the cache.
_PIECE_BYTES = 256 * 1024
# A long vector goes around in parts, so that received bytes are still in the cache when they are forwarded.
_PART_BYTES = 4 * 2**20
_SOCKET_BYTES = 4 * 2**20
# After this time without a byte, a worker checks whether the others are alive.
PATIENCE_SECONDS = 5.0
# Added to the time that is left, because a socket's timeout of 0 means not to wait at all.
_LATE_SECONDS = 0.01


class TcpRing:
    """The two connections of one worker: to the next rank and from the previous one.

    All ranks must make the same calls in the same order, with vectors of the same length and dtype. A call raises
    TimeoutError if the others do not send, and ConnectionError if one of them is lost.

    Attributes:
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
        check_others: Callable[[], None],
    ):
        """Args:
        rank: index of this worker.
        num_workers: number of workers.
        to_next, from_previous: connected sockets; they may be the same one.
        timeout_seconds: seconds to wait for the others.
        check_others: called after some seconds without a byte; raises ConnectionError if another worker is lost.
        """
        self._rank, self._num_workers = rank, num_workers
        self._next, self._previous = to_next, from_previous
        self._timeout_seconds, self._check_others = timeout_seconds, check_others
        self.failure: OSError | None = None
        for connection in (to_next, from_previous):
            prepare(connection)
        self._to_send: queue.SimpleQueue = queue.SimpleQueue()
        self._sent: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def all_reduce(self, own: np.ndarray, wire: np.dtype) -> np.ndarray:
        """The sum of all ranks' `own` [n].

        Args:
          own: vector of numbers.
          wire: number format that is sent; sums are computed in own's dtype and rounded to it before each hop.
        """
        total = np.empty_like(own)
        with self._failures():
            for part in _parts(own):
                self._reduce_part(own[part], total[part], wire)
        return total

    def all_gather(self, own: np.ndarray) -> np.ndarray:
        """Every rank's `own` [n], as [ranks, n]."""
        gathered = np.empty((self._num_workers, len(own)), own.dtype)
        gathered[self._rank] = sent = own
        with self._failures():
            for hop in range(1, self._num_workers):
                sent = self._forward(sent, gathered[(self._rank - hop) % self._num_workers])
        return gathered

    def broadcast(self, own: np.ndarray) -> np.ndarray:
        """Rank 0's `own` [n], bit by bit."""
        value = own if self._rank == 0 else np.empty_like(own)
        with self._failures():
            for part in _parts(own):
                if self._rank > 0:
                    self._receive(_bytes_of(value[part]))
                if self._rank < self._num_workers - 1:
                    self._send(value[part])
                    self._wait_until_sent()
        return value

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Context manager: remembers an error. TensorFlow, whose graph calls us, replaces it by one of its own."""
        try:
            yield
        except OSError as error:
            self.failure = error
            raise

    def _reduce_part(self, own: np.ndarray, total: np.ndarray, wire: np.dtype) -> None:
        ends = boundaries(len(own), even_shares(self._num_workers))
        chunks = [slice(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]

        def chunk(steps_back: int) -> slice:
            return chunks[(self._rank - steps_back) % self._num_workers]

        # In the wire's own dtype, bytes are received directly into the result; else into a buffer.
        received = total if wire == own.dtype else np.empty(len(own), wire)
        sent = own[chunk(0)].astype(wire, copy=False)
        for hop in range(1, self._num_workers):
            here = chunk(hop)
            sent = self._forward(sent, received[here], add=own[here])
        for hop in range(self._num_workers - 1):
            sent = self._forward(sent, received[chunk(hop)])
        if received is not total:
            total[:] = received

    def _forward(self, sent: np.ndarray, received: np.ndarray, add: np.ndarray | None = None) -> np.ndarray:
        """Sends to the next rank while it receives from the previous one; returns `received` plus `add`."""
        self._send(sent)
        view, item = _bytes_of(received), received.itemsize
        for start in range(0, len(received), _PIECE_BYTES // item):
            piece = slice(start, min(len(received), start + _PIECE_BYTES // item))
            self._receive(view[piece.start * item : piece.stop * item])
            if add is not None:
                # Summed in add's dtype, then rounded to the wire's.
                np.add(
                    received[piece].astype(add.dtype, copy=False),
                    add[piece],
                    out=received[piece],
                    casting="unsafe",
                )
        self._wait_until_sent()
        return received

    def _send(self, vector: np.ndarray) -> None:
        self._to_send.put(_bytes_of(vector))

    def _wait_until_sent(self) -> None:
        problem = self._sent.get()
        if problem is not None:
            raise problem

    def _receive(self, view: memoryview) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while view:
            left = max(0.0, deadline - time.monotonic())
            try:
                self._previous.settimeout(min(PATIENCE_SECONDS, left + _LATE_SECONDS))
                count = self._previous.recv_into(view)
            except TimeoutError:
                self._check_others()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no data for {self._timeout_seconds:g} seconds") from None
                continue
            if count == 0:
                raise ConnectionError("the previous worker closed the connection")
            view = view[count:]

    def _send_all(self) -> None:
        """Body of the sending thread. Sending must not wait for receiving, or all workers would wait forever."""
        while True:
            try:
                _send(self._next, self._to_send.get())
                self._sent.put(None)
            except OSError as error:
                self._sent.put(error)
                return


def prepare(connection: socket.socket) -> None:
    """Sets what both ends of a connection need: no delay, large buffers, and a timeout."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, _SOCKET_BYTES)
    connection.settimeout(PATIENCE_SECONDS)


def _send(connection: socket.socket, view: memoryview) -> None:
    """Sends all bytes, without a deadline: the receiving side has one."""
    while view:
        try:
            view = view[connection.send(view) :]
        except TimeoutError:
            continue


def _parts(vector: np.ndarray) -> Iterator[slice]:
    """Slices of at most _PART_BYTES each."""
    length = max(1, _PART_BYTES // vector.itemsize)
    return (slice(start, start + length) for start in range(0, len(vector), length))


def _bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return memoryview(array.view(np.uint8))
