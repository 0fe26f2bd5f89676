"""Collectives over TCP between processes of one ring, for numbers in the host's memory.

TensorFlow's own ring sends through gRPC, which copies each byte several times; here it goes from the array to the
socket and back. The algorithm is the usual one (Patarasu and Yuan 2009): a vector in W chunks; in W - 1 rounds
each chunk goes once around and is summed, in W - 1 more the sums go around. With W = 3, what each rank sends:

    rank 0     chunk 0   chunk 2 | chunk 1   chunk 0
    rank 1     chunk 1   chunk 0 | chunk 2   chunk 1
    rank 2     chunk 2   chunk 1 | chunk 0   chunk 2
               sums so far       | whole sums

A chunk's sum is made on one rank and copied to the others, so all have the same bits.

Its deadline and its errors are its own: TensorFlow 2.21 may crash when it ends a collective that waited in vain.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from towers.split import boundaries, even_shares

# Sums are taken while more is on its way, in pieces that stay in the cache.
_PIECE_BYTES = 256 * 1024
# A long vector goes around in parts, so that what is received is still in the cache when it is sent on.
_PART_BYTES = 4 * 2**20
_SOCKET_BYTES = 4 * 2**20
# Who waits so long without a byte asks whether the others are still there.
PATIENCE_SECONDS = 5.0
# A timeout of 0 seconds would not wait at all.
_LATE_SECONDS = 0.01


class TcpRing:
    """One process's two connections: to the next rank and from the one before.

    Attributes:
      failure: why the last call failed; None while none has.

    Every call is made by all ranks in the same order, with vectors of the same length and dtype, and raises
    TimeoutError or ConnectionError when the others did not answer or one is gone.
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
        rank, num_workers: this one's place.
        to_next, from_previous: connected; the first may be the same connection as the second.
        timeout_seconds: how long to wait for the others.
        check_others: called when nothing came for some seconds; raises when one of them is gone.
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
          wire: what travels; sums are taken in own's dtype and rounded to this before each hop.
        """
        total = np.empty_like(own)
        with self._failures():
            for part in _parts(own):
                self._reduce_part(own[part], total[part], wire)
        return total

    def all_gather(self, own: np.ndarray) -> np.ndarray:
        """Every rank's `own` [n] as [ranks, n]."""
        gathered = np.empty((self._num_workers, len(own)), own.dtype)
        gathered[self._rank] = sent = own
        with self._failures():
            for hop in range(1, self._num_workers):
                sent = self._pass_on(sent, gathered[(self._rank - hop) % self._num_workers])
        return gathered

    def broadcast(self, own: np.ndarray) -> np.ndarray:
        """Rank 0's `own` [n], to the last bit."""
        given = own if self._rank == 0 else np.empty_like(own)
        with self._failures():
            for part in _parts(own):
                if self._rank > 0:
                    self._receive(_bytes_of(given[part]))
                if self._rank < self._num_workers - 1:
                    self._send(given[part])
                    self._wait_until_sent()
        return given

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Keeps what is raised within: TensorFlow, from whose graph we are called, makes its own error of it."""
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

        # What has the wire's dtype is received where it belongs; the rest needs room of its own.
        received = total if wire == own.dtype else np.empty(len(own), wire)
        sent = own[chunk(0)].astype(wire, copy=False)
        for hop in range(1, self._num_workers):
            place = chunk(hop)
            sent = self._pass_on(sent, received[place], add=own[place])
        for hop in range(self._num_workers - 1):
            sent = self._pass_on(sent, received[chunk(hop)])
        if received is not total:
            total[:] = received

    def _pass_on(self, sent: np.ndarray, received: np.ndarray, add: np.ndarray | None = None) -> np.ndarray:
        """Sends to the next rank while receiving from the one before; `received`, with `add` added to it."""
        self._send(sent)
        view, item = _bytes_of(received), received.itemsize
        for start in range(0, len(received), _PIECE_BYTES // item):
            piece = slice(start, min(len(received), start + _PIECE_BYTES // item))
            self._receive(view[piece.start * item : piece.stop * item])
            if add is not None:
                # In add's dtype, then rounded to the wire's.
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
                    raise TimeoutError(f"nothing came for {self._timeout_seconds:g} seconds") from None
                continue
            if count == 0:
                raise ConnectionError("the worker before this one closed the connection")
            view = view[count:]

    def _send_all(self) -> None:
        """A thread's whole life: sending must not wait for receiving, or all would wait for all."""
        while True:
            try:
                _send(self._next, self._to_send.get())
                self._sent.put(None)
            except OSError as error:
                self._sent.put(error)
                return


def prepare(connection: socket.socket) -> None:
    """Sets what both ends of a connection need: no delay, room, and a timeout after which to look around."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, _SOCKET_BYTES)
    connection.settimeout(PATIENCE_SECONDS)


def _send(connection: socket.socket, view: memoryview) -> None:
    """As sendall, waiting as long as it takes: the receiving side keeps the deadline."""
    while view:
        try:
            view = view[connection.send(view) :]
        except TimeoutError:
            continue


def _parts(vector: np.ndarray) -> Iterator[slice]:
    """Of at most _PART_BYTES each."""
    length = max(1, _PART_BYTES // vector.itemsize)
    return (slice(start, start + length) for start in range(0, len(vector), length))


def _bytes_of(array: np.ndarray) -> memoryview:
    """Of a contiguous array, without a copy."""
    return memoryview(array.view(np.uint8))
