"""Collectives over TCP between the workers of a ring, for numbers in the host's memory.

TensorFlow's own ring sends through gRPC, which copies each byte several times; here bytes go from the array to the
socket and back. The algorithm is the usual one (Patarasu and Yuan 2009): the vector is cut into W chunks; in W - 1
rounds each chunk goes around the ring and is summed, in W - 1 more rounds the sums go around. With W = 3, each
rank sends:

    rank 0     chunk 0   chunk 2 | chunk 1   chunk 0
    rank 1     chunk 1   chunk 0 | chunk 2   chunk 1
    rank 2     chunk 2   chunk 1 | chunk 0   chunk 2
               partial sums      | complete sums

One rank computes the sum of a chunk and the others copy it, so all have the same bits. The two halves are also
calls of their own, a reduce-scatter and an all-gather, with a part of any size for each rank.

A short vector takes half the rounds if each rank sends its own around and sums all of them.

A long vector goes around in parts, whose chunks have the same size for any number of workers: shorter chunks would
take as long as their latency. Each piece of a chunk is sent on as soon as it is summed, so that no hop waits for a
whole chunk.

Each chunk is a frame, whose head says what it is of. So ranks that do not make the same calls are an error:

    8 bytes number of the call, 4 checksum of its purpose, 4 checksum of its dtype, 8 length | the chunk's bytes

It has its own deadlines and errors, because TensorFlow 2.21 may crash when one of its collectives times out.

Rates: 0.83 of gloo's at 8 and 32 MiB, twice gloo's at 1 MiB; the rest is page faults of new arrays and one more
copy out of TensorFlow's tensors. TensorFlow's ring reaches 0.3 to 0.5 of gloo's, in one piece or in 2 to 16 at
once; gather and add, with two workers, is slower still.
"""

import contextlib
import itertools
import queue
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from strategies.keepalive import is_closed, keep_alive
from towers.split import boundaries, even_shares

# Sums are computed while more bytes arrive, in parts that stay in the cache.
_SUMMED_BYTES = 256 * 1024
# Pieces of a chunk, each sent on before the next one arrives. Shorter ones cost more than they save.
_PASSED_BYTES = 512 * 1024
_CHUNK_BYTES = 2 * 2**20
_SOCKET_BYTES = 4 * 2**20
# Up to this size, all ranks' vectors go around sooner than chunks do twice: a round takes as long as its latency.
_GATHERED_BYTES = 8 * 1024
# After this time without a byte, a worker checks whether the others are alive.
PATIENCE_SECONDS = 5.0
# Up to this size, copying behind the head is cheaper than another system call.
_JOINED_BYTES = 64 * 1024
_HEAD = struct.Struct("<QIIQ")
# Added to the time that is left, because a socket's timeout of 0 means not to wait at all.
_LATE_SECONDS = 0.01


class OutOfStep(ConnectionError):
    """The previous worker makes another call than this one."""


class NeighbourLost(ConnectionError):
    """The connection to a neighbour is closed.

    Attributes:
      steps: the neighbours whose connections are closed: -1 for the previous worker, 1 for the next one.
    """

    def __init__(self, why: str, step: int):
        super().__init__(why)
        self.steps = (step,)


class TcpRing:
    """The two connections of one worker: to the next rank and from the previous one.

    All ranks must make the same calls in the same order, with vectors of the same length and dtype. A call raises
    TimeoutError if the others do not send or do not read, ConnectionError if one of them is lost, and OutOfStep if
    the previous rank makes another call. A `purpose` says what a call is for; it is the same on all ranks.

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
        check: Callable[[int], None],
    ):
        """Args:
        rank: index of this worker.
        num_workers: number of workers.
        to_next, from_previous: connected sockets; they may be the same one.
        timeout_seconds: seconds to wait for the others.
        check: called with a rank after some seconds without a byte; raises ConnectionError if that rank is lost.
        """
        self._rank, self._num_workers = rank, num_workers
        self._next, self._previous = to_next, from_previous
        self._timeout_seconds, self._check, self._num_silences = timeout_seconds, check, 0
        self.failure: OSError | None = None
        self._num_calls, self._purpose, self._checksum, self._num_unsent = 0, "", 0, 0
        for connection in (to_next, from_previous):
            prepare(connection)
        self._to_send: queue.SimpleQueue = queue.SimpleQueue()
        self._sent: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def all_reduce(self, own: np.ndarray, wire: np.dtype, *, purpose: str = "") -> np.ndarray:
        """The sum of all ranks' `own` [n].

        Args:
          own: vector of numbers.
          wire: number format that is sent; sums are computed in own's dtype and rounded to it before each hop.
          purpose: what the call is for.
        """
        with self._call(f"sum {purpose}"):
            if own.nbytes <= _GATHERED_BYTES and wire == own.dtype:
                of_all = self._gathered(own, [len(own)] * self._num_workers)
                return of_all.reshape(self._num_workers, len(own)).sum(axis=0, dtype=own.dtype)
            total = np.empty_like(own)
            for part in _parts(own, self._num_workers * _CHUNK_BYTES):
                self._reduce_part(own[part], total[part], wire)
            self._wait_until_sent()
        return total

    def reduce_scatter(
        self, own: np.ndarray, sizes: Sequence[int], wire: np.dtype, *, purpose: str = ""
    ) -> np.ndarray:
        """This rank's part of the sum of all ranks' `own` [n].

        Together with `all_gather_parts` it sends as many bytes as `all_reduce`.

        Args:
          own, wire, purpose: as for `all_reduce`.
          sizes: number of elements of each rank's part, in order; their sum is n.

        Returns:
          [sizes[rank]], rounded to the wire's number format.
        """
        ends = np.cumsum([0, *sizes])
        received = np.empty(len(own), wire)
        with self._call(f"scatter {purpose}"):
            for chunks in _chunks_by_round(ends, max(1, _CHUNK_BYTES // own.itemsize)):
                # A rank ends with the chunk after the one that it sends first.
                self._sum_chunks(own, received, [chunks[-1], *chunks[:-1]], passes_on=False)
            self._wait_until_sent()
        return received[ends[self._rank] : ends[self._rank + 1]].astype(own.dtype, copy=False)

    def all_gather(self, own: np.ndarray, *, purpose: str = "") -> np.ndarray:
        """Every rank's `own` [n], as [ranks, n]."""
        joined = self.all_gather_parts(own, [len(own)] * self._num_workers, purpose=purpose)
        return joined.reshape(self._num_workers, len(own))

    def all_gather_parts(self, own: np.ndarray, sizes: Sequence[int], *, purpose: str = "") -> np.ndarray:
        """Every rank's `own`, joined in order.

        Args:
          own: this rank's [sizes[rank]].
          sizes: the length of each rank's vector; the same on all ranks.
          purpose: what the call is for.
        """
        with self._call(f"gather {purpose}"):
            return self._gathered(own, sizes)

    def broadcast(self, own: np.ndarray, *, root: int = 0, purpose: str = "") -> np.ndarray:
        """The `own` [n] of rank `root`, bit by bit. That of the others only says length and dtype."""
        value = own if self._rank == root else np.empty_like(own)
        with self._call(f"broadcast {purpose}"):
            if self._rank == root:
                self._send(value)
            else:
                self._relay(value, passes_on=(self._rank + 1) % self._num_workers != root)
            self._wait_until_sent()
        return value

    @contextlib.contextmanager
    def _call(self, purpose: str) -> Iterator[None]:
        """Context manager: one call, whose frames have a number and a purpose.

        Remembers an error: TensorFlow, whose graph calls us, replaces it by one of its own.
        """
        self._num_calls += 1
        self._purpose, self._checksum = purpose, zlib.crc32(purpose.encode())
        try:
            # A sum that is not finite is found in the mean gradients.
            with np.errstate(over="ignore", invalid="ignore"):
                yield
        except OSError as error:
            if isinstance(error, NeighbourLost):
                # When one worker ends, the others end soon after. Which was first is unknown here, so both count.
                ends = {-1: self._previous, 1: self._next}
                error.steps = tuple(step for step in ends if step in error.steps or is_closed(ends[step]))
            self.failure = error
            raise

    def _reduce_part(self, own: np.ndarray, total: np.ndarray, wire: np.dtype) -> None:
        chunks = [
            slice(*ends) for ends in itertools.pairwise(boundaries(len(own), even_shares(self._num_workers)))
        ]
        # In the wire's own dtype, bytes are received directly into the result; else into a buffer.
        received = total if wire == own.dtype else np.empty(len(own), wire)
        self._sum_chunks(own, received, chunks, passes_on=True)
        # What was sent of a chunk is overwritten by its sum, which cannot arrive before it was sent.
        for hop in range(self._num_workers - 1):
            chunk = chunks[(self._rank - hop) % self._num_workers]
            self._relay(received[chunk], passes_on=hop < self._num_workers - 2)
        if received is not total:
            total[:] = received

    def _gathered(self, own: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Every rank's vector of the current call, as `all_gather_parts`."""
        ends = np.cumsum([0, *sizes])
        parts = [slice(*bounds) for bounds in itertools.pairwise(ends)]
        joined = np.empty(ends[-1], own.dtype)
        joined[parts[self._rank]] = own
        self._send(own)
        for hop in range(1, self._num_workers):
            part = parts[(self._rank - hop) % self._num_workers]
            self._relay(joined[part], passes_on=hop < self._num_workers - 1)
        self._wait_until_sent()
        return joined

    def _sum_chunks(
        self, own: np.ndarray, received: np.ndarray, chunks: Sequence[slice], *, passes_on: bool
    ) -> None:
        """Each chunk goes around the ring once and is summed. Rank r sends chunk r and ends with chunk r + 1.

        Args:
          own: this rank's numbers.
          received: gets partial sums, and the complete sum of one chunk, in the wire's dtype.
          chunks: one for each rank.
          passes_on: whether the complete sum is sent on, piece by piece.
        """
        count = self._num_workers
        self._send(own[chunks[self._rank]].astype(received.dtype, copy=False))
        for hop in range(1, count):
            chunk = chunks[(self._rank - hop) % count]
            self._relay(received[chunk], add=own[chunk], passes_on=passes_on or hop < count - 1)

    def _relay(self, received: np.ndarray, *, add: np.ndarray | None = None, passes_on: bool = True) -> None:
        """Receives a frame from the previous rank, adds `add`, and sends each piece of it to the next rank."""
        head, length = self._expect(received), _PASSED_BYTES // received.itemsize
        # An empty frame has one empty piece.
        for start in range(0, max(1, len(received)), length):
            piece = slice(start, start + length)
            self._receive_sum(received[piece], None if add is None else add[piece])
            if passes_on:
                self._send_bytes(_bytes_of(received[piece]), head if start == 0 else b"")

    def _receive_sum(self, received: np.ndarray, add: np.ndarray | None) -> None:
        """Receives numbers and adds `add` to them."""
        view, item = _bytes_of(received), received.itemsize
        for start in range(0, len(received), _SUMMED_BYTES // item):
            part = slice(start, min(len(received), start + _SUMMED_BYTES // item))
            self._receive(view[part.start * item : part.stop * item])
            if add is not None:
                add_to(received[part], add[part])

    def _head(self, vector: np.ndarray) -> bytes:
        """The head of the frame of a vector in the current call."""
        dtype = zlib.crc32(vector.dtype.str.encode())
        return _HEAD.pack(self._num_calls, self._checksum, dtype, vector.nbytes)

    def _send(self, vector: np.ndarray) -> None:
        self._send_bytes(_bytes_of(vector), self._head(vector))

    def _send_bytes(self, view: memoryview, head: bytes) -> None:
        if len(view) > _JOINED_BYTES:
            self._give(head, view)
            return
        left = head + view
        if self._is_all_sent():
            # The socket's buffer has room for it, and no other thread needs to wake up.
            with contextlib.suppress(TimeoutError), _neighbour_lost(1):
                left = left[self._next.send(left) :]
        if left:
            self._give(left)

    def _give(self, *parts: bytes | memoryview) -> None:
        """Gives bytes to the sending thread."""
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

    def _expect(self, vector: np.ndarray) -> bytes:
        """Receives the head of the frame of a vector, and returns it.

        Raises:
          OutOfStep: it is of another call, or of a vector of another length or dtype.
        """
        head, own = bytearray(_HEAD.size), self._head(vector)
        self._receive(memoryview(head))
        if head != own:
            number, purpose, dtype, length = _HEAD.unpack(head)
            own_number, own_purpose, own_dtype, own_length = _HEAD.unpack(own)
            is_same = (purpose, dtype) == (own_purpose, own_dtype)
            what = "the same" if is_same else "another purpose or dtype"
            raise OutOfStep(
                f"its exchange {number} has {length} bytes and {what}, this worker's exchange {own_number} "
                f"({self._purpose}) {own_length} bytes"
            )
        return own

    def _wait_until_sent(self) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while self._num_unsent:
            try:
                self._note_sent(self._sent.get(timeout=self._patience(deadline)))
            except queue.Empty:
                self._check_after_silence(deadline, self._rank + 1, "the next worker did not read")

    def _receive(self, view: memoryview) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while view:
            try:
                self._previous.settimeout(self._patience(deadline))
                with _neighbour_lost(-1):
                    count = self._previous.recv_into(view)
            except TimeoutError:
                self._check_after_silence(deadline, self._rank - 1, "no data")
                continue
            if count == 0:
                raise NeighbourLost("the previous worker closed the connection", -1)
            view = view[count:]

    def _patience(self, deadline: float) -> float:
        """Seconds to wait until the others are checked."""
        return min(PATIENCE_SECONDS, max(0.0, deadline - time.monotonic()) + _LATE_SECONDS)

    def _check_after_silence(self, deadline: float, neighbour: int, what: str) -> None:
        """Raises ConnectionError if another worker is lost, TimeoutError after the deadline.

        Checks the neighbour that it waits for and one other worker, each time the next: if all checked all, the
        checks would grow with the square of the workers.
        """
        # If the sending thread has found the next worker lost, nothing comes round the ring.
        self._is_all_sent()
        self._num_silences += 1
        for rank in dict.fromkeys((neighbour % self._num_workers, self._num_silences % self._num_workers)):
            if rank != self._rank:
                self._check(rank)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} for {self._timeout_seconds:g} seconds")

    def _send_all(self) -> None:
        """Body of the sending thread. Sending must not wait for receiving, or all workers would wait forever."""
        while True:
            try:
                _send(self._next, self._to_send.get(), until=lambda: self.failure is not None)
                self._sent.put(None)
            except OSError as error:
                self._sent.put(error)
                return


@contextlib.contextmanager
def _neighbour_lost(step: int) -> Iterator[None]:
    """Context manager: a ConnectionError in it is a NeighbourLost."""
    try:
        yield
    except ConnectionError as error:
        raise NeighbourLost(str(error), step) from error


def add_to(received: np.ndarray, own: np.ndarray) -> None:
    """Adds `own` to `received`: summed in own's dtype, then rounded to that of `received`."""
    if received.dtype == np.float16:
        # NumPy converts float16 one number at a time, TensorFlow in vectors. The addition is NumPy's, because each
        # array that TensorFlow takes, and `Tensor.numpy`, is a copy.
        with tf.init_scope(), tf.device("/device:CPU:0"):
            total = np.asarray(tf.cast(received, own.dtype)) + own
            received[:] = np.asarray(tf.cast(total, received.dtype))
        return
    np.add(received.astype(own.dtype, copy=False), own, out=received, casting="unsafe")


def prepare(connection: socket.socket) -> None:
    """Sets what both ends of a connection need: no delay, keepalive, large buffers, and a timeout."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, _SOCKET_BYTES)
    connection.settimeout(PATIENCE_SECONDS)


def _send(connection: socket.socket, parts: Sequence[bytes | memoryview], *, until: Callable[[], bool]) -> None:
    """Sends all bytes. The thread that waits for it has the deadline; `until` says that it waits no more."""
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


def _parts(vector: np.ndarray, part_bytes: int) -> Iterator[slice]:
    """Slices of at most so many bytes each."""
    length = max(1, part_bytes // vector.itemsize)
    return (slice(start, start + length) for start in range(0, len(vector), length))


def _chunks_by_round(ends: Sequence[int], length: int) -> Iterator[list[slice]]:
    """The ranks' parts of a vector in rounds: in each the next `length` elements of every part, until all end."""
    for offset in range(0, max(end - begin for begin, end in itertools.pairwise(ends)), length):
        yield [
            slice(min(begin + offset, end), min(begin + offset + length, end))
            for begin, end in itertools.pairwise(ends)
        ]


def _bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return memoryview(array.view(np.uint8))
